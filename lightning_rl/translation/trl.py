"""From TRL: a GRPOConfig, with the arguments of its GRPOTrainer, as a recipe."""

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_rl.translation.option import RefusedError, Settings
from lightning_rl.translation.recipe import Given, Recipe
from lightning_rl.translation.scripts import Script, UnreadableError, read_mapping
from lightning_rl.translation.trl_options import CONFIG, SCRIPT, TRAINER, VERSION
from lightning_rl.translation.values import Call, Code, Named, imports_of, python

UNKNOWN = f"no option of TRL {VERSION}'s GRPOConfig or GRPOTrainer"
EPSILON = 1e-4  # under TRL's standard deviations
PLACES = tuple(TRAINER)  # GRPOTrainer's arguments in their order
TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
TOKEN_MEANS = ("dapo", "bnpo", "cispo", "vespo")
COUNTS = ("num_generations", "num_iterations", "per_device_train_batch_size", "gradient_accumulation_steps")
COUNTS += ("max_completion_length",)
LOGGERS = {"tensorboard": "TensorBoardLogger", "wandb": "WandbLogger", "mlflow": "MLFlowLogger"}
LOGGERS |= {"comet_ml": "CometLogger", "none": "CSVLogger"}
LORA = {"lora_task_type": "task_type", "lora_r": "r", "lora_alpha": "lora_alpha", "use_dora": "use_dora"}
LORA |= {f"lora_{name}": name for name in ("target_modules", "target_parameters", "modules_to_save")}
LORA |= {"use_rslora": "use_rslora"}


def read_trl(path: Path) -> tuple[dict[str, Any], Script | None]:
    """The options of a file: a script with a GRPOConfig, or YAML or JSON as ``trl grpo --config`` takes it.

    Returns:
        Options of GRPOConfig, GRPOTrainer and ``trl grpo`` by name, and the script, if it is one.

    Raises:
        RefusedError: of options that nothing would read.
        UnreadableError: saying what is wrong with the file.
    """
    if path.suffix != ".py":
        values = read_mapping(path)
        if "args" in values:
            raise RefusedError({"args": "expected its options beside the others, as `trl grpo --config` takes them"})
        return values, None
    if not path.is_file():
        raise UnreadableError(f"expected {path} to be a file, got {'a folder' if path.is_dir() else 'none'}")
    try:
        script = Script(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"expected a script, got an error: {error}") from error
    config, trainer = script.call("GRPOConfig"), script.call("GRPOTrainer")
    if config is None and trainer is None:
        raise UnreadableError(f"expected a GRPOConfig(...) or a GRPOTrainer(...) in {path}, got none")
    values = {} if config is None else script.arguments(config, ("output_dir",))
    values |= {} if trainer is None else script.arguments(trainer, PLACES)
    return {name: value for name, value in values.items() if name != "args"}, script


def from_trl(path: Path, given: Given = Given()) -> Recipe:  # noqa: B008  frozen
    """A recipe from a file of TRL.

    Args:
        path: of a script, YAML or JSON.
        given: what the file does not say.

    Raises:
        RefusedError: with the name of each option that is refused, and why.
        UnreadableError: saying what is wrong with the file.
    """
    values, script = read_trl(path)
    return _Translation(values, script, given).recipe(path.name)


@dataclass(slots=True)
class _Translation:
    """One translation; each method makes a part of the recipe from the options that it reads."""

    values: dict[str, Any]
    script: Script | None
    given: Given
    settings: Settings = field(init=False)
    functions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        options = {**SCRIPT, **CONFIG, **TRAINER}
        self.settings = Settings(options, self.values, UNKNOWN)
        for name, value in self.values.items():
            if isinstance(value, ast.expr) and name not in TRAINER:
                self.settings.refuse(name, f"expected a value that is written out, got {ast.unparse(value)}")
        for name in ("epsilon_high", "bf16"):  # None is their default, and means another one
            self.settings.notes.pop(name, None)

    def recipe(self, origin: str) -> Recipe:
        """The whole of it."""
        settings = self.settings
        settings.refuse_below_one(*COUNTS)
        if not isinstance(settings["bf16"], bool | None):
            settings.refuse("bf16", f"expected true or false, got {settings['bf16']!r}")
        if self.given.devices < 1:
            settings.refuse("--devices", f"expected at least 1, got {self.given.devices}")
        settings.check()
        data = self.data()
        rollout = self.rollout()
        steps, schedule = self.steps(rollout)
        module = {
            "policy": self.policy(),
            **self.tokenizer(),
            "rewards": self.rewards(),
            "advantages": self.advantages(),
            "loss": self.loss(),
            "reduction": self.reduction(),
            **self.engine(),
            "sampling": self.sampling(),
            **self.environment(),
            **self.evaluation(),
            "group_size": settings["num_generations"],
            **{name: rollout[name] for name in ("minibatches", "epochs") if rollout[name] != 1},
            "optimizer": self.optimizer(),
            **schedule,
            "max_grad_norm": settings["max_grad_norm"] or None,
            "token_budget": max(4096, settings["per_device_train_batch_size"] * self.max_new_tokens()),
            **({"activation_checkpointing": True} if self.checkpointing() else {}),
            **({"compile": True} if settings["torch_compile"] else {}),
            **({"liger": True} if settings["use_liger_kernel"] else {}),
            "seed": settings["seed"],
        }
        trainer = {**self.trainer(), "max_steps": Code("steps") if steps else settings["max_steps"]}
        trainer["callbacks"] = [*self.corrections(), *self.callbacks()]
        settings.check()
        return Recipe(
            origin=f"{origin}, made for TRL {VERSION}, by `lightning-rl from-trl`",
            count=len(settings.values),
            notes=settings.notes,
            module=module,
            data={**data, "prompts_per_rollout": rollout["prompts_per_rollout"], **self.order()},
            trainer=trainer,
            steps=steps,
            code=[*(self.script.statements() if self.script is not None else ()), *self.functions],
        )

    # What is learned.

    def advantages(self) -> Call:
        """TRL's epsilon of 1e-4 is kept."""
        scale = {True: "group", False: "none"}.get(self.settings["scale_rewards"], self.settings["scale_rewards"])
        if scale == "none":
            return Call("lightning_rl.DrGRPO")
        if scale == "batch":
            return Call("lightning_rl.Normalized", {"std": "batch", "epsilon": EPSILON})
        if scale != "group":
            self.settings.refuse("scale_rewards", f"expected group, batch or none, got {scale!r}")
        return Call("lightning_rl.GRPO", {"epsilon": EPSILON})

    def loss(self) -> Call:
        """By ``loss_type`` and ``importance_sampling_level``."""
        settings, kind = self.settings, self.settings["loss_type"]
        if kind == "cispo":
            return self._cispo()
        if kind == "sapo":
            self._check_token_level()
            taus = {f"tau_{sign}": settings[f"sapo_temperature_{sign[:3]}"] for sign in ("positive", "negative")}
            return Call("lightning_rl.SAPO", taus)
        if kind == "vespo":
            return self._vespo()
        if kind not in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
            settings.refuse("loss_type", f"expected one that TRL {VERSION} has, got {kind!r}")
        clip = {"clip_low": settings["epsilon"], "clip_high": self._clip_high()}
        if settings["delta"] is not None:
            if settings["delta"] <= 1 + clip["clip_high"]:
                settings.refuse(
                    "delta", f"expected more than 1 + epsilon_high, {1 + clip['clip_high']:g}, where it binds"
                )
            clip["dual_clip"] = settings["delta"]
        return Call("lightning_rl.GSPO" if self._by_sequence() else "lightning_rl.ClippedSurrogate", clip)

    def reduction(self) -> Any:
        """By ``loss_type``."""
        kind = self.settings["loss_type"]
        if kind == "bnpo":
            self.settings.notes["loss_type"] = "no denominator here runs over a microbatch alone: it becomes token_mean"
        if kind == "dr_grpo":
            return Call("lightning_rl.SequenceSumNorm", {"length": self.max_new_tokens()})
        if kind == "luspo":
            return Call("lightning_rl.SequenceSumNorm", {"length": 1})
        return "token_mean" if kind in TOKEN_MEANS else "sequence_mean"

    def corrections(self) -> list[Call]:
        """The callbacks that bend the signal."""
        settings, callbacks = self.settings, "lightning_rl.callbacks"
        corrections = list(self._mismatch())
        if settings["beta"]:
            unbiased = {"unbiased": True} if settings["use_bias_correction_kl"] else {}
            if unbiased and self._by_sequence():
                settings.notes["use_bias_correction_kl"] = (
                    "the KL of a token is weighed with the ratio of the token; beside importance_sampling_level="
                    "sequence TRL weighs it with that of the response"
                )
            options = {"beta": settings["beta"], "as_loss": True, **unbiased}
            corrections.append(Call(f"{callbacks}.ReferenceKL", options))
        if settings["mask_truncated_completions"]:
            corrections.append(Call(f"{callbacks}.NoEOSMask", {"action": "drop_tokens"}))
        if settings["off_policy_mask_threshold"] is not None:
            against = {"against": "rollout"} if settings["use_vllm"] else {}
            corrections.append(Call(f"{callbacks}.OPSM", {"delta": settings["off_policy_mask_threshold"], **against}))
        if settings["use_adaptive_entropy"]:
            options = {"target": settings["entropy_target"], "step": settings["entropy_coef_delta"]}
            corrections.append(Call(f"{callbacks}.EntropyBonus", {"coef": settings["entropy_coef"], **options}))
        elif settings["entropy_coef"]:
            if settings["entropy_coef"] < 0:
                settings.refuse("entropy_coef", "expected at least 0: here it is a bonus")
            corrections.append(Call(f"{callbacks}.EntropyBonus", {"coef": settings["entropy_coef"]}))
        if settings["router_aux_loss_coef"]:
            settings.refuse(
                "router_aux_loss_coef", "no load-balancing loss is added; write a callback with `loss_term`"
            )
        return corrections

    def _mismatch(self) -> list[Call]:
        """What corrects for the difference of engine and trainer, with vLLM alone."""
        settings, callbacks = self.settings, "lightning_rl.callbacks"
        if not settings["use_vllm"] or not settings["vllm_importance_sampling_correction"]:
            return []
        mode = settings["vllm_importance_sampling_mode"]
        low, high = settings["vllm_importance_sampling_clip_min"], settings["vllm_importance_sampling_clip_max"]
        if settings["vllm_importance_sampling_cap"] is not None:
            high = settings["vllm_importance_sampling_cap"]
        low, high = 0.0 if low is None else low, math.inf if high is None else high
        if settings["loss_type"] == "vespo":
            settings.notes["vllm_importance_sampling_mode"] = (
                "the ratio of VESPO runs from the engine's policy to the current one as it is; TRL bounds the part "
                "between engine and trainer"
            )
            if mode != "token_truncate":
                settings.refuse("vllm_importance_sampling_mode", "beside vespo expected token_truncate")
            return []
        bounds = {"low": low, "high": high}
        if not (low <= 1 <= high):
            settings.refuse("vllm_importance_sampling_clip_max", f"expected bounds around 1, got {low} and {high}")
        weigh = {"cap": math.inf}
        modes: dict[str, list[Call]] = {
            "token_truncate": [Call(f"{callbacks}.TruncatedIS", {"cap": high, "floor": low})],
            "sequence_truncate": [
                Call(f"{callbacks}.TruncatedIS", {"level": "sequence", "cap": high, "floor": low}),
            ],
            "token_mask": [Call(f"{callbacks}.IcePop", bounds), Call(f"{callbacks}.TruncatedIS", weigh)],
            "sequence_mask": [
                Call(f"{callbacks}.SequenceRatioMask", {"statistic": "product", **bounds}),
                Call(f"{callbacks}.TruncatedIS", {"level": "sequence", **weigh}),
            ],
        }
        if mode not in modes:
            settings.refuse("vllm_importance_sampling_mode", f"expected one of {', '.join(modes)}, got {mode!r}")
        return modes.get(mode, [])

    def _cispo(self) -> Call:
        self._check_token_level()
        if self._clip_high() < 1:
            self.settings.refuse(
                "epsilon_high",
                f"with cispo TRL caps the weight at epsilon_high itself, {self._clip_high():g}, below the 1 of samples "
                "on policy; set at least 1, as 5.0",
            )
        return Call("lightning_rl.CISPO", {"clip_low": 1.0, "clip_high": self._clip_high() - 1})

    def _vespo(self) -> Call:
        settings = self.settings
        corrected = settings["use_vllm"] and settings["vllm_importance_sampling_correction"]
        options = {
            f"{name}_{sign}": settings[f"vespo_{name}_{sign[:3]}"]
            for sign in ("positive", "negative")
            for name in ("k", "lambda")
        }
        return Call("lightning_rl.VESPO", {**options, "anchor": "rollout" if corrected else "old"})

    def _clip_high(self) -> float:
        high = self.settings["epsilon_high"]
        return self.settings["epsilon"] if high is None else high

    def _by_sequence(self) -> bool:
        level = self.settings["importance_sampling_level"]
        if level not in ("token", "sequence"):
            self.settings.refuse("importance_sampling_level", f"expected token or sequence, got {level!r}")
        return level == "sequence"

    def _check_token_level(self) -> None:
        if self._by_sequence():
            reason = f"expected token with loss_type {self.settings['loss_type']}: its ratio is of tokens"
            self.settings.refuse("importance_sampling_level", reason)

    # Rollouts.

    def max_new_tokens(self) -> int:
        """A limit there has to be."""
        if self.settings["max_completion_length"] is None:
            self.settings.refuse("max_completion_length", "expected a number: a rollout needs a limit")
            return 1
        return self.settings["max_completion_length"]

    def sampling(self) -> Call:
        """How tokens are drawn."""
        settings = self.settings
        options = {"temperature": settings["temperature"], "top_k": settings["top_k"], "top_p": settings["top_p"]}
        options["min_p"] = settings["min_p"] or 0.0
        rest = {
            name: value for name, value in options.items() if value != (1.0 if name in ("temperature", "top_p") else 0)
        }
        return Call("lightning_rl.Sampling", {"max_new_tokens": self.max_new_tokens(), **rest})

    def rollout(self) -> dict[str, int]:
        """Prompts, minibatches and passes of a rollout."""
        settings = self.settings
        rows = settings["per_device_train_batch_size"] * self.given.devices
        accumulation, asked = settings["gradient_accumulation_steps"], settings["steps_per_generation"]
        if settings["generation_batch_size"] is not None:
            if asked is not None:
                settings.refuse("generation_batch_size", "expected it or steps_per_generation, got both")
            if settings["generation_batch_size"] % rows:
                settings.refuse("generation_batch_size", f"expected a multiple of {rows} rows of all devices")
            asked = settings["generation_batch_size"] // rows
        steps = accumulation if asked is None else asked
        prompts, rest = divmod(rows * steps, settings["num_generations"])
        minibatches, over = divmod(steps, accumulation)
        if over or not minibatches:
            reason = f"expected a multiple of gradient_accumulation_steps={accumulation}, got {steps}"
            settings.refuse("steps_per_generation", f"{reason}: a rollout is a whole number of optimizer steps")
        if rest or not prompts:
            reason = (
                f"{rows * steps} rows of a rollout are no multiple of num_generations={settings['num_generations']}"
            )
            settings.refuse("per_device_train_batch_size", f"{reason}; --devices says how many processes there are")
        elif minibatches and prompts % (minibatches * self.given.devices):
            reason = (
                f"{prompts} prompts of a rollout cannot be dealt to {minibatches} steps of {self.given.devices} devices"
            )
            settings.refuse("per_device_train_batch_size", f"{reason}: a group is never split")
        if minibatches > 1:
            settings.notes["steps_per_generation"] = (
                f"{CONFIG['steps_per_generation'].says}, and under dapo, cispo and vespo it divides by the tokens of "
                "the rollout over the number of its steps, where the step's own tokens count here"
            )
        return {
            "prompts_per_rollout": prompts,
            "minibatches": max(minibatches, 1),
            "epochs": settings["num_iterations"],
        }

    def steps(self, rollout: Mapping[str, int]) -> tuple[str | None, dict[str, Any]]:
        """The number of optimizer steps, as code unless it is written, and the schedule of the learning rate."""
        settings, steps = self.settings, None
        if settings["max_steps"] <= 0:
            per_rollout = rollout["minibatches"] * rollout["epochs"]
            epochs = float(settings["num_train_epochs"])
            pass_steps = f"data.pass_length // {rollout['prompts_per_rollout']}"
            pass_steps = f"({pass_steps})" + (f" * {per_rollout}" if per_rollout > 1 else "")
            steps = f"{int(epochs)} * {pass_steps}" if epochs.is_integer() else f"ceil({epochs} * {pass_steps})"
        kind, warmup = settings["lr_scheduler_type"], settings["warmup_steps"]
        total: Any = Code("steps") if steps else settings["max_steps"]
        if warmup and warmup < 1:
            warmup = Code(f"ceil({warmup} * steps)", ("math.ceil",)) if steps else math.ceil(warmup * total)
        warmup = int(warmup) if isinstance(warmup, float) else warmup
        if kind == "constant":
            return steps, {}
        if kind == "linear":
            if warmup:
                settings.notes.setdefault("warmup_steps", CONFIG["lr_scheduler_type"].says)
            options = {"warmup": warmup, "total": total}
            return steps, {"lr_scheduler": Call("lightning_rl.optimizers.WarmupThenLinear", options, bound=True)}
        options = {"num_warmup_steps": warmup, "num_training_steps": total}
        return steps, {"lr_scheduler": Call("transformers.get_scheduler", options, (kind,), bound=True)}

    def order(self) -> dict[str, Any]:
        """Which prompt is next."""
        settings = self.settings
        seed = settings["seed"] if settings["data_seed"] is None else settings["data_seed"]
        template = settings["chat_template_kwargs"]
        options: dict[str, Any] = {"seed": seed} if settings["shuffle_dataset"] else {"shuffle": False}
        return {**options, **({"chat_template_kwargs": template} if template else {})}

    # What a script builds.

    def data(self) -> dict[str, Any]:
        """Where the prompts come from."""
        if self.settings["train_dataset"] is not None:
            return self._source("train_dataset")
        name, split = self.settings["dataset_name"], self.settings["dataset_train_split"]
        if self.given.prompts is not None:
            return {"prompts": self.given.prompts}
        if name is None:
            self.settings.refuse("train_dataset", "missing: say which with --prompts FILE")
            return {}
        config = {"name": self.settings["dataset_config"]} if self.settings["dataset_config"] else {}
        return {"prompts": name, **config, "split": split}

    def _source(self, name: str) -> dict[str, Any]:
        """A data set of a script: a call of load_dataset by its arguments, anything else as it is written there."""
        node = self.settings[name]
        if not isinstance(node, ast.expr) or self.script is None:
            return {"prompts": node}
        call = self.script.follow(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "load_dataset":
            arguments = self.script.arguments(call, ("path", "name", "data_files"))
            if all(isinstance(value, str) for value in arguments.values()):
                path, files = arguments.pop("path"), arguments.pop("data_files", None)
                arguments.pop("split", None) if files else None
                if set(arguments) <= {"name", "split"} and (files is None or path in ("json", "csv", "parquet")):
                    return {"prompts": files or path, **arguments}
        return {"prompts": self._carry(name, node)}

    def _carry(self, name: str, node: ast.expr) -> Any:
        """An expression of the script; refused under a name if it cannot stand elsewhere."""
        if self.script is None:
            raise TypeError("expected an expression of a script, got one without")
        try:
            return self.script.carry(node)
        except UnreadableError as error:
            self.settings.refuse(name, str(error))
            return None

    def policy(self) -> Any:
        """A name, or what builds the model."""
        settings = self.settings
        node = settings["model"] or settings["model_name_or_path"] or self.given.model
        if node is None:
            settings.refuse("model", "missing: say which with --model NAME")
        if isinstance(node, ast.expr) and self.script is not None:
            node = self.script.follow(node)
            built = self._carry("model", node)
            if not isinstance(built, Code):
                settings.refuse("model", "expected its name, or what builds it, written out")
                return None
            return self._policy_function(self._with_adapter(built))
        options = self._init_options()
        built = Call("transformers.AutoModelForCausalLM.from_pretrained", options, (node,), bound=True)
        if settings["peft_config"] is not None or settings["use_peft"]:
            return self._policy_function(self._with_adapter(replace(built, bound=False)))
        return built if options else node

    def _init_options(self) -> dict[str, Any]:
        """Arguments of from_pretrained."""
        settings = self.settings
        options = dict(settings["model_init_kwargs"] or {})
        for name, ours in (("model_revision", "revision"), ("attn_implementation", "attn_implementation")):
            if settings[name] not in (None, "main"):
                options.setdefault(ours, settings[name])
        if settings["dtype"] not in (None, "float32"):
            options.setdefault("dtype", settings["dtype"])
        if options.get("dtype") == "float32":
            del options["dtype"]
        if options.get("trust_remote_code"):
            settings.refuse("model_init_kwargs", CONFIG["trust_remote_code"].says)
        return options

    def _policy_function(self, model: Call | Code) -> Code:
        """A function of the recipe that builds the policy."""
        self.functions.append(f"def policy():\n    return {python(model, 4, 7)}")
        return Code("policy", tuple(imports_of(model)))

    def _with_adapter(self, model: Call | Code) -> Call | Code:
        """A model with its adapter, if there is one."""
        settings, node = self.settings, self.settings["peft_config"]
        if node is None and not settings["use_peft"]:
            return model
        if node is not None:
            return Call("peft.get_peft_model", {}, (model, self._carry("peft_config", node)))
        settings.notes.setdefault("lora_dropout", SCRIPT["lora_dropout"].says)
        values = {ours: settings[name] for name, ours in LORA.items()}
        options = {ours: value for ours, value in values.items() if value not in (None, False)}
        return Call("peft.get_peft_model", {}, (model, Call("peft.LoraConfig", options)))

    def tokenizer(self) -> dict[str, Any]:
        """Needed wherever the policy is no name."""
        node = self.settings["processing_class"]
        if isinstance(node, ast.expr):
            return {"tokenizer": self._carry("processing_class", node)}
        model = self.settings["model"] or self.settings["model_name_or_path"] or self.given.model
        built = isinstance(model, ast.expr)
        if built and self.script is not None:
            call = self.script.follow(model)
            names = [self.script.value(part) for part in call.args] if isinstance(call, ast.Call) else []
            if names and isinstance(names[0], str):
                return {"tokenizer": names[0]}
            self.settings.refuse("processing_class", "missing: the policy is no name, so the tokenizer has to be named")
            return {}
        adapted = self.settings["peft_config"] is not None or self.settings["use_peft"]
        return {"tokenizer": model} if self._init_options() or adapted else {}

    def rewards(self) -> Any:
        """By name, each with its weight."""
        parts = self._reward_list()
        weights = self.settings["reward_weights"] or [1.0] * len(parts)
        if not isinstance(weights, list | tuple):
            self.settings.refuse("reward_weights", f"expected a list, got {weights!r}")
            weights = [weights] * len(parts)
        if len(weights) != len(parts):
            self.settings.refuse("reward_weights", f"expected {len(parts)}, one for each reward, got {len(weights)}")
        if not parts:
            if self.settings["environment_factory"] is not None:
                return Call("lightning_rl.environments.EnvironmentReward")
            self.settings.refuse("reward_funcs", "missing: say which with --reward module.function")
        names = [name for name, _ in parts]
        if len(set(names)) < len(names):
            self.settings.refuse("reward_funcs", f"expected names of their own, got {', '.join(names)}")
        if len(parts) == 1 and weights == [1.0]:
            return parts[0][1]
        return {
            name: part if weight == 1.0 else (part, weight)
            for (name, part), weight in zip(parts, weights, strict=False)
        }

    def _reward_list(self) -> list[tuple[str, Any]]:
        node = self.settings["reward_funcs"]
        if isinstance(node, ast.expr) and self.script is not None:
            node = self.script.follow(node)
            nodes: Sequence[Any] = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        else:
            nodes = [] if node is None else node if isinstance(node, list) else [node]
            nodes = [*nodes, *self.given.rewards]
            if self.settings["reward_model_name_or_path"]:
                nodes = [
                    Call("lightning_rl.rewards.RewardModel", {"model": self.settings["reward_model_name_or_path"]}),
                    *nodes,
                ]
        return [self._reward(part, number) for number, part in enumerate(nodes, 1)]

    def _reward(self, node: Any, number: int) -> tuple[str, Any]:
        """Name and function of one reward."""
        if isinstance(node, Call):
            return f"reward_{number}", node
        value = self.script.value(node) if isinstance(node, ast.expr) and self.script is not None else node
        if isinstance(value, str) and isinstance(node, ast.expr):
            return f"reward_{number}", Call("lightning_rl.rewards.RewardModel", {"model": value})
        if isinstance(value, str):
            if value in TRL_REWARDS:
                return value, Named(f"trl.rewards.{value}")
            if value == "get_soft_overlong_punishment":
                options = {"max_completion_len": 1280, "soft_punish_cache": 256}
                return value, Call(f"trl.rewards.{value}", options)
            if "." not in value or not all(map(str.isidentifier, value.split("."))):
                self.settings.refuse("reward_funcs", f"expected module.function, got {value!r}")
            return value.rpartition(".")[2], Named(value)
        if not isinstance(node, ast.expr):
            self.settings.refuse("reward_funcs", f"expected names of functions, got {node!r}")
            return f"reward_{number}", node
        name = node.id if isinstance(node, ast.Name) else f"reward_{number}"
        return name, self._carry("reward_funcs", node)

    def environment(self) -> dict[str, Any]:
        """What the policy talks to over several turns."""
        settings, options = self.settings, {}
        for theirs, ours in (("tools", "tools"), ("environment_factory", "environment")):
            if isinstance(settings[theirs], ast.expr):
                options[ours] = self._carry(theirs, settings[theirs])
            elif settings[theirs] is not None:
                settings.refuse(theirs, "expected it in a script: functions have no form in YAML")
        if options and settings["max_tool_calling_iterations"] is not None:
            options["max_turns"] = settings["max_tool_calling_iterations"] + 1
        return options

    def engine(self) -> dict[str, Any]:
        """vLLM, or the policy itself."""
        settings = self.settings
        if not settings["use_vllm"]:
            return {}
        if settings["vllm_mode"] == "server":
            url = settings["vllm_server_base_url"]
            host = "127.0.0.1" if settings["vllm_server_host"] == "0.0.0.0" else settings["vllm_server_host"]
            options = {"servers": url or f"http://{host}:{settings['vllm_server_port']}"}
            options |= {"patience": settings["vllm_server_timeout"]}
            settings.notes.setdefault("vllm_mode", CONFIG["vllm_server_host"].says)
            return {"engine": Call("lightning_rl.VLLMServerEngine", options)}
        if settings["vllm_mode"] != "colocate":
            settings.refuse("vllm_mode", f"expected colocate or server, got {settings['vllm_mode']!r}")
        options = {"gpu_memory_utilization": settings["vllm_gpu_memory_utilization"]}
        options |= {"sleeps": settings["vllm_enable_sleep_mode"]}
        if settings["vllm_max_model_length"] is not None:
            options["max_model_len"] = settings["vllm_max_model_length"]
        if settings["vllm_tensor_parallel_size"] != 1:
            options["tensor_parallel_size"] = settings["vllm_tensor_parallel_size"]
        return {"engine": Call("lightning_rl.VLLMEngine", options)}

    # The rest.

    def optimizer(self) -> Call:
        """AdamW in most cases."""
        settings, name = self.settings, str(self.settings["optim"])
        options: dict[str, Any] = {"lr": settings["learning_rate"], "weight_decay": settings["weight_decay"]}
        if name == "sgd":
            return Call("torch.optim.SGD", options, bound=True)
        betas = (settings["adam_beta1"], settings["adam_beta2"])
        options |= {"betas": betas} if betas != (0.9, 0.999) else {}
        options |= {"eps": settings["adam_epsilon"]} if settings["adam_epsilon"] != 1e-8 else {}
        if name in ("adamw_bnb_8bit", "adamw_8bit"):
            return Call("lightning_rl.adamw_8bit", options)
        if name not in ("adamw_torch", "adamw_torch_fused"):
            settings.refuse("optim", f"expected adamw_torch, adamw_torch_fused, adamw_8bit or sgd, got {name!r}")
        return Call("torch.optim.AdamW", {**options, "fused": True}, bound=True)

    def checkpointing(self) -> bool:
        """Whether activations are computed again, which TRL does by default."""
        explicit = self.settings["activation_checkpointing"]
        return bool(self.settings["gradient_checkpointing"] if explicit is None else explicit)

    def trainer(self) -> dict[str, Any]:
        """Devices, precision, logging."""
        settings = self.settings
        bf16 = not settings["fp16"] if settings["bf16"] is None else settings["bf16"]
        precision = "bf16-mixed" if bf16 else "16-mixed" if settings["fp16"] else "32-true"
        options: dict[str, Any] = {"accelerator": "cpu"} if settings["use_cpu"] else {}
        options |= {"devices": self.given.devices, "precision": precision}
        if settings["fsdp"]:
            options["strategy"] = "fsdp2"
        elif self.given.devices > 1:
            options["strategy"] = "ddp"
        if settings["full_determinism"]:
            options["deterministic"] = True
        if settings["disable_tqdm"]:
            options["enable_progress_bar"] = False
        if settings["save_strategy"] == "no":
            options["enable_checkpointing"] = False
        return {**options, **self._logging(), **self._validation()}

    def _logging(self) -> dict[str, Any]:
        settings = self.settings
        if settings["logging_strategy"] == "no":
            return {"logger": False}
        if settings["logging_strategy"] != "steps":
            settings.refuse("logging_strategy", "expected steps or no: a row of metrics is of optimizer steps")
        if settings["logging_steps"] < 1:
            settings.refuse("logging_steps", "expected a number of steps, not a share of them")
        names = settings["report_to"] if isinstance(settings["report_to"], list) else [settings["report_to"]]
        unknown = [name for name in names if name not in LOGGERS]
        if unknown:
            known = ", ".join(LOGGERS)
            settings.refuse("report_to", f"expected loggers out of {known}, got {unknown[0]!r}")
            return {}
        loggers = [self._logger(LOGGERS[name]) for name in names]
        return {
            "logger": loggers[0] if len(loggers) == 1 else loggers,
            "log_every_n_steps": int(settings["logging_steps"]),
        }

    def _logger(self, kind: str) -> Call:
        settings, path = self.settings, f"lightning.pytorch.loggers.{kind}"
        folder, name = settings["output_dir"] or "trainer_output", settings["run_name"]
        if kind in ("CSVLogger", "TensorBoardLogger"):
            return Call(path, {"save_dir": folder, **({"name": name} if name else {})})
        if kind == "WandbLogger":
            return Call(path, {"project": settings["project"], "save_dir": folder, **({"name": name} if name else {})})
        return Call(path, {"run_name": name} if name and kind == "MLFlowLogger" else {})

    def callbacks(self) -> list[Call]:
        """Checkpoints and a table of samples."""
        settings, callbacks = self.settings, []
        if settings["save_strategy"] in ("steps", "epoch"):
            folder = settings["output_dir"] or "trainer_output"
            if settings["save_strategy"] == "epoch":
                often = {"every_n_epochs": 1}
            else:
                often = {"every_n_train_steps": int(settings["save_steps"])}
                if settings["save_steps"] < 1:
                    settings.refuse("save_steps", "expected a number of steps, not a share of them")
            limit = settings["save_total_limit"]
            keep = {"save_top_k": -1} if limit is None else {"monitor": "step", "mode": "max", "save_top_k": limit}
            callbacks.append(Call("lightning.pytorch.callbacks.ModelCheckpoint", {"dirpath": folder, **often, **keep}))
        elif settings["save_strategy"] != "no":
            settings.refuse(
                "save_strategy", "expected steps, epoch or no; `ModelCheckpoint(monitor=...)` keeps the best"
            )
        if settings["log_completions"]:
            rows = settings["num_completions_to_print"]
            options = {"every_n_rollouts": max(int(settings["logging_steps"]), 1), **({"rows": rows} if rows else {})}
            callbacks.append(Call("lightning_rl.reporting.SampleTable", options))
        return callbacks

    def evaluation(self) -> dict[str, Any]:
        """Answers to the prompts of the test split."""
        settings = self.settings
        if settings["eval_strategy"] == "no":
            return {}
        if settings["eval_dataset"] is not None:
            source = self._source("eval_dataset")
        elif settings["dataset_name"] is not None:
            config = {"name": settings["dataset_config"]} if settings["dataset_config"] else {}
            source = {"prompts": settings["dataset_name"], **config, "split": settings["dataset_test_split"]}
        else:
            settings.refuse("eval_dataset", "missing, though eval_strategy asks for it")
            return {}
        prompts, rest = source.pop("prompts"), source
        samples = settings["num_generations_eval"] or settings["num_generations"]
        if rest:
            prompts = Call("lightning_rl.data.PromptDataset", {"source": prompts, **rest})
        return {"evaluation": Call("lightning_rl.Evaluation", {"name": "eval", "prompts": prompts, "samples": samples})}

    def _validation(self) -> dict[str, Any]:
        settings = self.settings
        if settings["eval_strategy"] == "steps":
            every = int(settings["eval_steps"] or settings["logging_steps"])
            return {"val_check_interval": every, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
        if settings["eval_strategy"] not in ("no", "epoch"):
            settings.refuse("eval_strategy", f"expected no, steps or epoch, got {settings['eval_strategy']!r}")
        return {"num_sanity_val_steps": 0} if settings["eval_strategy"] == "epoch" else {}
