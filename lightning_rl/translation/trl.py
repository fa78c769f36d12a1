"""Translation of a GRPOConfig of TRL to the source of a recipe."""

import ast
import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from lightning_rl.translation.trl_options import OPTIONS, VERSION

EPSILON = 1e-4  # added to standard deviations by TRL
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
SIGNS = {"positive": "pos", "negative": "neg"}
LOGGERS = {"tensorboard": "TensorBoardLogger", "wandb": "WandbLogger", "mlflow": "MLFlowLogger"}
LOGGERS |= {"comet_ml": "CometLogger", "none": "CSVLogger"}
TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
OVERLONG = {"max_completion_len": 1280, "soft_punish_cache": 256}  # trl grpo's get_soft_overlong_punishment
PATH = re.compile("\0(.*?)\0")  # marks a dotted name that has to be imported


class UnreadableError(Exception):
    """Error for a file that is not a configuration."""


class RefusedError(Exception):
    """Error for options that cannot be translated.

    Attributes:
        reasons: Reason for each option by name.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        super().__init__("\n".join(f"{name}: {reason}" for name, reason in self.reasons.items()))


def from_trl(
    path: Path, devices: int = 1, model: str | None = None, rewards: Sequence[str] = (), prompts: str | None = None
) -> tuple[str, dict[str, str]]:
    """Translate a script with a GRPOConfig, or YAML or JSON for ``trl grpo --config``.

    Return the source of the recipe, and differences from TRL by the names of the options.

    Args:
        path: Path of the configuration.
        devices: Number of processes of the run.
        model: Name or folder of the policy, if the configuration has none.
        rewards: Dotted names of reward functions, if the configuration has none.
        prompts: File or data set of prompts, if the configuration has none.

    Raises:
        RefusedError: With the reason for each refused option.
        UnreadableError: If the file is not a configuration.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = _read_script(text) if path.suffix == ".py" else yaml.safe_load(text)
    except (OSError, ValueError, SyntaxError, RecursionError, yaml.YAMLError) as error:
        raise UnreadableError(f"expected {path} to be a script, YAML or JSON, got an error: {error}") from error
    if not isinstance(values, dict):
        raise UnreadableError(f"expected {path} to hold options by name, got {type(values).__name__}")
    beside = {"model_name_or_path": model, "reward_funcs": list(rewards), "dataset_name": prompts}
    writer = _Writer({name: value for name, value in beside.items() if value} | values, devices)
    return writer.script(path.name), writer.notes


def _read_script(text: str) -> dict[str, Any]:
    """Return the options of the only GRPOConfig in a script, which is parsed and never run.

    A name that is assigned once is replaced by its value; other expressions are kept.
    """
    nodes = list(ast.walk(ast.parse(text)))
    configs = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("GRPOConfig")]
    if len(configs) != 1:
        raise ValueError(f"expected one GRPOConfig(...), got {len(configs)}")
    assigned: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).append(node.value)

    def value_of(node: ast.expr) -> Any:
        bound = assigned.get(node.id, []) if isinstance(node, ast.Name) else []
        try:
            return ast.literal_eval(bound[0] if len(bound) == 1 else node)
        except ValueError:
            return node

    values = dict(zip(["output_dir"], map(value_of, configs[0].args), strict=False))
    for keyword in configs[0].keywords:
        value = value_of(keyword.value)
        if keyword.arg is None and not isinstance(value, dict):
            raise ValueError(f"expected literal options, got **{ast.unparse(keyword.value)}")
        values |= value if keyword.arg is None else {keyword.arg: value}
    return values


class _Source(str):
    """A Python expression."""

    __slots__ = ()


def _name(path: str) -> _Source:
    return _Source(f"\0{path}\0")


def _call(path: str, *places: Any, **options: Any) -> _Source:
    arguments = [*map(_literal, places), *(f"{name}={_literal(value)}" for name, value in options.items())]
    return _Source(f"{_name(path)}({', '.join(arguments)})")


def _partial(path: str, *places: Any, **options: Any) -> _Source:
    return _call("functools.partial", _name(path), *places, **options)


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return value if isinstance(value, _Source) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_literal(name)}: {_literal(part)}' for name, part in value.items())}}}"
    if isinstance(value, list | tuple):
        inside = ", ".join(map(_literal, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)


def _statement(name: str, path: str, options: Mapping[str, Any]) -> str:
    """Return the assignment of a call, with one argument per line."""
    lines = [f"{name} = {_name(path)}("]
    for option, value in options.items():
        parts = [f"        {part}," for part in value] if option == "callbacks" else []
        lines += [f"    {option}=[", *parts, "    ],"] if parts else [f"    {option}={_literal(value)},"]
    return "\n".join([*lines, ")"])


def _local_name(path: str) -> str:
    """Return a dotted name without its module: ``Model.from_pretrained``."""
    parts = path.split(".")
    first = next((place for place, part in enumerate(parts) if part[0].isupper()), len(parts) - 1)
    return ".".join(parts[first:])


class _Writer:
    """Writer of a recipe; each method translates the options of one part."""

    def __init__(self, values: Mapping[str, Any], devices: int) -> None:
        self.devices = devices
        self.values = {name: _as_number(value, name) for name, value in values.items()}
        self.notes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        for name, value in self.values.items():
            option, near = OPTIONS.get(name), get_close_matches(name, OPTIONS, n=1)
            if option is None:
                hint = f"; did you mean {near[0]}?" if near else ""
                self.refuse(name, f"no option of TRL {VERSION}'s GRPOConfig or trl grpo{hint}")
            elif isinstance(value, ast.expr):
                self.refuse(name, f"expected a literal value, got {ast.unparse(value)}")
            elif option.verdict == "refused" and value != option.default:
                self.refuse(name, option.note)
            elif option.verdict == "different" and value != option.default:
                self.notes[name] = option.note

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name, OPTIONS[name].default)

    def refuse(self, name: str, reason: str) -> None:
        """Record a refused option; the first reason is kept."""
        self.reasons.setdefault(name, reason)

    def choose(self, name: str, choices: Mapping[Any, Any]) -> Any:
        """Return the choice for the value of an option; refuse a value without one."""
        if self[name] not in choices:
            self.refuse(name, f"expected one of {', '.join(map(str, choices))}, got {self[name]!r}")
        return choices.get(self[name])

    def script(self, origin: str) -> str:
        """Return the script.

        Raises:
            RefusedError: With the reason for each refused option.
        """
        if self.reasons:
            raise RefusedError(self.reasons)
        prompts, rollout = self.rollout()
        steps, schedule = self.steps(prompts, rollout)
        recompute, rows = self["activation_checkpointing"], self["per_device_train_batch_size"]
        flags = {
            "activation_checkpointing": self["gradient_checkpointing"] if recompute is None else recompute,
            "compile": self["torch_compile"],
            "liger": self["use_liger_kernel"],
        }
        model = {"max_tokens_per_microbatch": max(4096, rows * (self["max_completion_length"] or 1))}
        model |= {name: True for name, value in flags.items() if value}
        module = {
            **self.policy(),
            "rewards": self.rewards(),
            "advantages": self.advantages(),
            "loss": self.loss(),
            "reduction": self.reduction(),
            **self.engine(),
            "sampling": self.sampling(),
            "group_size": self["num_generations"],
            **rollout,
            "optimizer": self.optimizer(),
            **schedule,
            "max_grad_norm": self["max_grad_norm"] or None,
            "model": _call("lightning_rl.ModelOptions", **model),
            "seed": self["seed"],
        }
        trainer = {**self.trainer(), "max_steps": _Source("steps") if steps else self["max_steps"]}
        trainer["callbacks"] = [*self.mismatch(), *self.corrections(), *self.checkpoints()]
        parts = [_statement("data", "lightning_rl.PromptDataModule", {**self.data(), "prompts_per_rollout": prompts})]
        parts += [f"steps = {steps}"] if steps else []
        parts += [_statement("module", "lightning_rl.RLLightningModule", module)]
        parts += [_statement("trainer", "lightning.pytorch.Trainer", trainer)]
        if self.reasons:
            raise RefusedError(self.reasons)
        body = "\n".join(parts) + '\n\nif __name__ == "__main__":\n    trainer.fit(module, data)\n'
        names = {path: _local_name(path) for path in PATH.findall(body)}
        imports = {f"from {p.removesuffix(f'.{name}')} import {name.partition('.')[0]}" for p, name in names.items()}
        body = PATH.sub(lambda found: names[found[1]], body)
        return "\n".join([self.docstring(origin), "", *sorted(imports), "", body])

    def docstring(self, origin: str) -> str:
        """Return the docstring of the script, with the notes."""
        lines = [f"From {origin}, made for TRL {VERSION}, by `lightning-rl from-trl`."]
        if self.notes:
            fill = textwrap.TextWrapper(119, subsequent_indent="  ", break_on_hyphens=False).fill
            notes = (fill(f"* {name}: {note}.") for name, note in self.notes.items())
            lines += ["", "Differences from TRL:", "", *notes, ""]
        return '"""' + "\n".join(lines).replace("\\", "\\\\") + '"""'

    # The algorithm.

    def advantages(self) -> _Source:
        """Return the estimator, with TRL's epsilon."""
        group, none = _call("lightning_rl.GRPO", epsilon=EPSILON), _call("lightning_rl.DrGRPO")
        batch = _call("lightning_rl.Normalized", std="batch", epsilon=EPSILON)
        return self.choose("scale_rewards", {"group": group, True: group, "batch": batch, "none": none, False: none})

    def loss(self) -> _Source:
        """Return the loss of ``loss_type`` and ``importance_sampling_level``."""
        kind, delta = self["loss_type"], self["delta"]
        by_sequence = self.choose("importance_sampling_level", {"token": False, "sequence": True})
        high = self["epsilon"] if self["epsilon_high"] is None else self["epsilon_high"]
        if by_sequence and kind in ("cispo", "sapo"):
            self.refuse("importance_sampling_level", f"expected token with loss_type {kind}: its ratio is per token")
        if kind == "cispo" and high < 1:
            reason = f"with cispo TRL caps the weight at epsilon_high, {high:g}, below the 1 of samples on policy"
            self.refuse("epsilon_high", f"{reason}; set at least 1, as 5.0")
        if kind in CLIPPED and delta is not None and delta <= 1 + high:
            self.refuse("delta", f"expected more than 1 + epsilon_high, {1 + high:g}, because it has no effect below")
        clip = {"clip_low": self["epsilon"], "clip_high": high} | ({} if delta is None else {"dual_clip": delta})
        taus = {f"tau_{sign}": self[f"sapo_temperature_{short}"] for sign, short in SIGNS.items()}
        vespo = {f"{x}_{sign}": self[f"vespo_{x}_{short}"] for sign, short in SIGNS.items() for x in ("k", "lambda")}
        anchor = "rollout" if self["use_vllm"] and self["vllm_importance_sampling_correction"] else "old"
        surrogate = _call("lightning_rl.GSPO" if by_sequence else "lightning_rl.ClippedSurrogate", **clip)
        losses = {
            "cispo": _call("lightning_rl.CISPO", clip_low=1.0, clip_high=high - 1),
            "sapo": _call("lightning_rl.SAPO", **taus),
            "vespo": _call("lightning_rl.VESPO", **vespo, anchor=anchor),
        }
        return self.choose("loss_type", {**losses, **dict.fromkeys(CLIPPED, surrogate)})

    def reduction(self) -> str:
        """Return the reduction of ``loss_type``."""
        kind, lengths = self["loss_type"], {"dr_grpo": self["max_completion_length"], "luspo": 1}
        if kind == "bnpo":
            self.notes["loss_type"] = "a denominator covers the whole optimizer step: it becomes token_mean"
        if kind in lengths:
            return _call("lightning_rl.SequenceSumNorm", length=lengths[kind])
        return "sequence_mean" if kind in ("grpo", "sapo") else "token_mean"

    def corrections(self) -> list[_Source]:
        """Return the callbacks that change the signal."""
        calls, callbacks = list[_Source](), "lightning_rl.callbacks"
        if self["beta"]:
            unbiased = {"unbiased": True} if self["use_bias_correction_kl"] else {}
            if unbiased and self["importance_sampling_level"] == "sequence":
                self.notes["use_bias_correction_kl"] = (
                    "the KL of a token is weighted by the ratio of the token, in TRL by that of the response"
                )
            calls.append(_call(f"{callbacks}.ReferenceKL", beta=self["beta"], as_loss=True, **unbiased))
        if self["mask_truncated_completions"]:
            calls.append(_call(f"{callbacks}.NoEOSMask", action="drop_tokens"))
        if self["off_policy_mask_threshold"] is not None:
            against = {"against": "rollout"} if self["use_vllm"] else {}
            calls.append(_call(f"{callbacks}.OPSM", delta=self["off_policy_mask_threshold"], **against))
        if self["entropy_coef"] < 0:
            self.refuse("entropy_coef", "expected at least 0: here it is a bonus")
        if self["entropy_coef"] or self["use_adaptive_entropy"]:
            target = {"target": self["entropy_target"], "step": self["entropy_coef_delta"]}
            adaptive = target if self["use_adaptive_entropy"] else {}
            calls.append(_call(f"{callbacks}.EntropyBonus", coef=self["entropy_coef"], **adaptive))
        if self["router_aux_loss_coef"]:
            calls.append(_call(f"{callbacks}.RouterAuxLoss", coef=self["router_aux_loss_coef"]))
        return calls

    def mismatch(self) -> list[_Source]:
        """Return the callbacks that correct the mismatch between vLLM and trainer."""
        name, callbacks = "vllm_importance_sampling_", "lightning_rl.callbacks"
        if not self["use_vllm"] or not self[f"{name}correction"]:
            return []
        if self["loss_type"] == "vespo":
            self.notes[f"{name}mode"] = (
                "the ratio of VESPO is between the engine's policy and the current one; TRL bounds its part between "
                "engine and trainer"
            )
            return self.choose(f"{name}mode", {"token_truncate": []}) or []
        limits = (self[f"{name}cap"], self[f"{name}clip_max"], math.inf)
        low, high = self[f"{name}clip_min"] or 0.0, next(limit for limit in limits if limit is not None)
        if not low <= 1 <= high:
            self.refuse(f"{name}clip_max", f"expected bounds around 1, got {low} and {high}")
        truncated, sequence = f"{callbacks}.TruncatedIS", {"level": "sequence"}
        token_mask = _call(f"{callbacks}.IcePop", low=low, high=high)
        sequence_mask = _call(f"{callbacks}.SequenceRatioMask", statistic="product", low=low, high=high)
        modes = {
            "token_truncate": [_call(truncated, cap=high, floor=low)],
            "sequence_truncate": [_call(truncated, **sequence, cap=high, floor=low)],
            "token_mask": [token_mask, _call(truncated, cap=math.inf)],
            "sequence_mask": [sequence_mask, _call(truncated, **sequence, cap=math.inf)],
        }
        return self.choose(f"{name}mode", modes) or []

    # Rollouts and steps.

    def sampling(self) -> _Source:
        """Return the sampling parameters."""
        if self["max_completion_length"] is None:
            self.refuse("max_completion_length", "expected a number, because a rollout needs a limit")
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None}
        filters = {name: self[name] for name, value in neutral.items() if self[name] != value}
        return _call("lightning_rl.SamplingParams", max_new_tokens=self["max_completion_length"], **filters)

    def rollout(self) -> tuple[int, dict[str, int]]:
        """Return the number of prompts per rollout, and minibatches and epochs if they are not 1."""
        rows, group = self["per_device_train_batch_size"] * self.devices, self["num_generations"]
        accumulation, steps = self["gradient_accumulation_steps"], self["steps_per_generation"]
        if self["generation_batch_size"] is not None:
            if steps is not None or self["generation_batch_size"] % rows:
                reason = f"expected a multiple of {rows} rows of all devices, without steps_per_generation"
                self.refuse("generation_batch_size", reason)
            steps = self["generation_batch_size"] // rows
        steps = accumulation if steps is None else steps
        prompts, minibatches = rows * steps // group, steps // accumulation
        if steps % accumulation or not steps:
            reason = f"expected a multiple of gradient_accumulation_steps={accumulation}, got {steps}"
            self.refuse("steps_per_generation", f"{reason}: a rollout is a whole number of optimizer steps")
        elif rows * steps % group or not prompts or prompts % (minibatches * self.devices):
            reason = f"expected whole groups of {group} for {minibatches} steps of {self.devices} devices"
            self.refuse("per_device_train_batch_size", f"{reason}, got {rows * steps} rows; see --devices")
        if minibatches > 1:
            self.notes["steps_per_generation"] = (
                f"{OPTIONS['steps_per_generation'].note}, and under dapo, cispo and vespo it divides by the mean of "
                "the tokens per step of a rollout, where the step's own tokens count here"
            )
        counts = {"minibatches_per_rollout": minibatches, "epochs_per_rollout": self["num_iterations"]}
        return prompts, {name: count for name, count in counts.items() if count != 1}

    def steps(self, prompts: int, rollout: Mapping[str, int]) -> tuple[str, dict[str, Any]]:
        """Return the number of optimizer steps as code, empty if ``max_steps`` is set, and the schedule."""
        steps, total = "", self["max_steps"]
        if total <= 0:
            passes, per_rollout = float(self["num_train_epochs"]), math.prod(rollout.values())
            whole = f"(data.pass_length // {prompts})" + (f" * {per_rollout}" if per_rollout > 1 else "")
            exact = f"{_name('math.ceil')}({passes} * {whole})"
            steps, total = f"{int(passes)} * {whole}" if passes.is_integer() else exact, _Source("steps")
        kind, warmup = self["lr_scheduler_type"], self["warmup_steps"]
        if 0 < warmup < 1:
            warmup = _Source(f"{_name('math.ceil')}({warmup} * steps)") if steps else math.ceil(warmup * total)
        if kind == "linear":
            if warmup:
                self.notes["warmup_steps"] = OPTIONS["lr_scheduler_type"].note
            schedule = _partial("lightning_rl.optimizers.WarmupThenLinear", warmup=warmup, total=total)
        else:
            counts = {"num_warmup_steps": warmup, "num_training_steps": total}
            schedule = _partial("transformers.get_scheduler", kind, **counts)
        return steps, {} if kind == "constant" else {"lr_scheduler": schedule}

    # Models, data and rewards.

    def data(self) -> dict[str, Any]:
        """Return the prompts and their order."""
        name, template = self["dataset_name"], self["chat_template_kwargs"]
        if name is None:
            self.refuse("dataset_name", "missing: pass it with --prompts")
        data = {"prompts": name} | ({"name": self["dataset_config"]} if self["dataset_config"] else {})
        data |= {} if Path(str(name)).suffix else {"split": self["dataset_train_split"]}
        seed = self["seed"] if self["data_seed"] is None else self["data_seed"]
        data |= {"seed": seed} if self["shuffle_dataset"] else {"shuffle": False}
        return data | ({"chat_template_kwargs": template} if template else {})

    def policy(self) -> dict[str, Any]:
        """Return the policy, with its tokenizer if it is built with options."""
        name = self["model_name_or_path"]
        options = {"dtype": self["dtype"], "attn_implementation": self["attn_implementation"]}
        options |= {"revision": self["model_revision"], **(self["model_init_kwargs"] or {})}
        options = {option: value for option, value in options.items() if value not in (None, "main", "float32")}
        if name is None:
            self.refuse("model_name_or_path", "missing: pass it with --model")
        if options.get("trust_remote_code"):
            self.refuse("model_init_kwargs", OPTIONS["trust_remote_code"].note)
        built = _partial("transformers.AutoModelForCausalLM.from_pretrained", name, **options)
        return {"policy": built, "tokenizer": name} if options else {"policy": name}

    def rewards(self) -> Any:
        """Return the rewards by name, each with its weight."""
        names, model = self["reward_funcs"] or [], self["reward_model_name_or_path"]
        parts = {"reward_model": _call("lightning_rl.rewards.RewardModel", model=model)} if model else {}
        parts |= dict(map(self.reward, names if isinstance(names, list) else [names]))
        weights = self["reward_weights"] or [1.0] * len(parts)
        if len(weights) != len(parts):
            self.refuse("reward_weights", f"expected {len(parts)}, one for each reward by its name, got {len(weights)}")
        if not parts:
            self.refuse("reward_funcs", "missing: pass it with --reward module.function")
        if weights == [1.0]:
            return next(iter(parts.values()), None)
        weighted = zip(parts.items(), weights, strict=False)
        return {name: part if weight == 1.0 else (part, weight) for (name, part), weight in weighted}

    def reward(self, name: str) -> tuple[str, Any]:
        """Return name and function of a reward: a dotted name, or one of TRL's own."""
        if name == "get_soft_overlong_punishment":
            return name, _call(f"trl.rewards.{name}", **OVERLONG)
        path = f"trl.rewards.{name}" if name in TRL_REWARDS else str(name)
        if "." not in path or not all(map(str.isidentifier, path.split("."))):
            self.refuse("reward_funcs", f"expected module.function, got {name!r}")
        return path.rpartition(".")[2], _name(path)

    def engine(self) -> dict[str, Any]:
        """Return the engine, if it is vLLM."""
        if not self["use_vllm"]:
            return {}
        host = "127.0.0.1" if self["vllm_server_host"] == "0.0.0.0" else self["vllm_server_host"]
        url = self["vllm_server_base_url"] or f"http://{host}:{self['vllm_server_port']}"
        if self["vllm_mode"] == "server":
            self.notes["vllm_mode"] = OPTIONS["vllm_server_host"].note
        share, sleeps = self["vllm_gpu_memory_utilization"], self["vllm_enable_sleep_mode"]
        length, ranks = self["vllm_max_model_length"], self["vllm_tensor_parallel_size"]
        options = {} if length is None else {"max_model_len": length}
        options |= {"tensor_parallel_size": ranks} if ranks != 1 else {}
        colocate = _call("lightning_rl.VLLMEngine", gpu_memory_utilization=share, sleeps=sleeps, **options)
        server = _call("lightning_rl.VLLMServerEngine", servers=url, patience=self["vllm_server_timeout"])
        return {"engine": self.choose("vllm_mode", {"colocate": colocate, "server": server})}

    # The rest.

    def optimizer(self) -> _Source:
        """Return the optimizer."""
        options = {"lr": self["learning_rate"], "weight_decay": self["weight_decay"]}
        betas, epsilon = (self["adam_beta1"], self["adam_beta2"]), self["adam_epsilon"]
        adam = {**options, "betas": betas} if betas != (0.9, 0.999) else options
        adam = {**adam, "eps": epsilon} if epsilon != 1e-8 else adam
        choices = dict.fromkeys(("adamw_torch", "adamw_torch_fused"), _partial("torch.optim.AdamW", **adam, fused=True))
        choices |= dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit"), _call("lightning_rl.adamw_8bit", **adam))
        return self.choose("optim", {**choices, "sgd": _partial("torch.optim.SGD", **options)})

    def trainer(self) -> dict[str, Any]:
        """Return the arguments of the Trainer."""
        bf16 = not self["fp16"] if self["bf16"] is None else self["bf16"]
        options: dict[str, Any] = {"accelerator": "cpu"} if self["use_cpu"] else {}
        options |= {"devices": self.devices}
        options |= {"precision": "bf16-mixed" if bf16 else "16-mixed" if self["fp16"] else "32-true"}
        options |= {"strategy": "fsdp2"} if self["fsdp"] else {"strategy": "ddp"} if self.devices > 1 else {}
        options |= {"deterministic": True} if self["full_determinism"] else {}
        options |= {"enable_progress_bar": False} if self["disable_tqdm"] else {}
        options |= {"enable_checkpointing": False} if self["save_strategy"] == "no" else {}
        if not self.choose("logging_strategy", {"no": False, "steps": True}):
            return {**options, "logger": False}
        for name in ("logging_steps", "save_steps"):
            if self[name] < 1:
                self.refuse(name, "expected a number of steps, not a share of them")
        names = self["report_to"] if isinstance(self["report_to"], list) else [self["report_to"]]
        loggers = [self.logger(name) for name in names]
        logger = loggers[0] if len(loggers) == 1 else loggers
        return {**options, "logger": logger, "log_every_n_steps": int(self["logging_steps"])}

    def logger(self, kind: str) -> _Source:
        """Return a logger of Lightning."""
        if kind not in LOGGERS:
            self.refuse("report_to", f"expected loggers out of {', '.join(LOGGERS)}, got {kind!r}")
        options = {} if kind in ("mlflow", "comet_ml") else {"save_dir": self["output_dir"] or "trainer_output"}
        options |= {"project": self["project"]} if kind == "wandb" else {}
        if self["run_name"] and kind != "comet_ml":
            options |= {"run_name" if kind == "mlflow" else "name": self["run_name"]}
        return _call(f"lightning.pytorch.loggers.{LOGGERS.get(kind)}", **options)

    def checkpoints(self) -> list[_Source]:
        """Return the callback that saves checkpoints."""
        limit, folder = self["save_total_limit"], self["output_dir"] or "trainer_output"
        keep = {"save_top_k": -1} if limit is None else {"monitor": "step", "mode": "max", "save_top_k": limit}
        steps = {"every_n_train_steps": int(self["save_steps"])}
        often = self.choose("save_strategy", {"no": None, "steps": steps, "epoch": {"every_n_epochs": 1}})
        saves = _call("lightning.pytorch.callbacks.ModelCheckpoint", dirpath=folder, **(often or {}), **keep)
        return [saves] if often else []


def _as_number(value: Any, name: str) -> Any:
    """Convert a string to a number if the option is one, because YAML reads ``1e-6`` as a string."""
    number = name in OPTIONS and isinstance(OPTIONS[name].default, int | float)
    for kind in (int, float) if number and isinstance(value, str) else ():
        try:
            return kind(value)
        except ValueError:
            continue
    return value
