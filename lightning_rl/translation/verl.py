"""From verl: the options of a GRPO run, as YAML and as they stand on verl's command line, as a recipe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import yaml

from lightning_rl.translation.option import Settings
from lightning_rl.translation.recipe import Given, Recipe
from lightning_rl.translation.scripts import UnreadableError, read_mapping
from lightning_rl.translation.values import Call, Code, Named
from lightning_rl.translation.verl_options import OPTIONS, VERSION

UNKNOWN = f"it is not translated: see which options of verl {VERSION} are"
ESTIMATORS = {"grpo": "GRPO", "rloo": "RLOO", "opo": "OPO"}
KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
LOGGERS = {"wandb": "WandbLogger", "tensorboard": "TensorBoardLogger", "mlflow": "MLFlowLogger"}
ACTOR, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
ROLLOUT, CORRECTION = "actor_rollout_ref.rollout.", "algorithm.rollout_correction."

ADAPTER = '''def verl_score(prompts, completions, *, data_source, reward_model, extra_info=None, **columns):
    """The score that {name} of verl gives to each row."""
    infos = extra_info or [None] * len(completions)
    rows = zip(data_source, completions, reward_model, infos, strict=True)
    scores = [{name}(source, text_of(said), truth["ground_truth"], info) for source, said, truth, info in rows]
    return [float(score["score"] if isinstance(score, dict) else score) for score in scores]'''


def from_verl(path: Path, overrides: Sequence[str] = (), given: Given = Given()) -> Recipe:  # noqa: B008  frozen
    """A recipe from a file of verl.

    Args:
        path: of YAML, with the options that are set, nested or by dotted names.
        overrides: ``name=value``, as on verl's command line; they count more than the file.
        given: what neither says.

    Raises:
        RefusedError: with the name of each option that is refused, and why.
        UnreadableError: saying what is wrong with the file or an override.
    """
    values = {**flat(read_mapping(path)), **dict(_override(word) for word in overrides)}
    return _Translation(Settings(OPTIONS, values, UNKNOWN), given).recipe(path.name)


def flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by their dotted names; what Hydra reads for itself is left out."""
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name in ("defaults", "hydra", "_target_"):
            continue
        whole = f"{prefix}{name}"
        if isinstance(value, dict) and whole not in OPTIONS:
            values |= flat(value, f"{whole}.")
        else:
            values[whole] = value
    return values


def _override(word: str) -> tuple[str, Any]:
    name, equals, text = word.lstrip("+").partition("=")
    if not equals:
        raise UnreadableError(f"expected name=value, got {word!r}")
    return name, yaml.safe_load(text) if text else None


@dataclass(slots=True)
class _Translation:
    """One translation; each method makes a part of the recipe from the options that it reads."""

    settings: Settings
    given: Given
    code: list[str] = field(default_factory=list)

    def recipe(self, origin: str) -> Recipe:
        """The whole of it."""
        settings = self.settings
        settings.refuse_below_one("data.train_batch_size", "data.max_response_length", f"{ROLLOUT}n")
        settings.refuse_below_one(f"{ACTOR}ppo_mini_batch_size", f"{ACTOR}ppo_epochs")
        settings.check()
        prompts = settings["data.train_batch_size"]
        minibatches, rest = divmod(prompts, a_step := settings[f"{ACTOR}ppo_mini_batch_size"])
        if rest or not minibatches:
            reason = f"expected a part of data.train_batch_size={prompts}, got {a_step}"
            settings.refuse(f"{ACTOR}ppo_mini_batch_size", reason)
        per_rollout = max(minibatches, 1) * settings[f"{ACTOR}ppo_epochs"]
        steps, max_steps = self._steps(per_rollout)
        module = {
            "policy": settings[f"{MODEL}path"] if self.given.model is None else self.given.model,
            **self._tokenizer(),
            "rewards": self.rewards(),
            "advantages": self.advantages(),
            "loss": self.loss(),
            "reduction": self.reduction(),
            **self.engine(),
            "sampling": self.sampling(),
            **self.evaluation(),
            "group_size": settings[f"{ROLLOUT}n"],
            "minibatches": max(minibatches, 1),
            "epochs": settings[f"{ACTOR}ppo_epochs"],
            "optimizer": self.optimizer(),
            **self._schedule(),
            "max_grad_norm": settings[f"{ACTOR}optim.clip_grad"],
            "token_budget": settings[f"{ACTOR}ppo_max_token_len_per_gpu"],
            "activation_checkpointing": settings[f"{MODEL}enable_gradient_checkpointing"],
            **({"liger": True} if settings[f"{MODEL}use_liger"] else {}),
        }
        trainer = {**self.trainer(per_rollout), "max_steps": max_steps}
        trainer["callbacks"] = [*self.corrections(), *self._checkpoints(per_rollout)]
        data = self.data()
        settings.check()
        return Recipe(
            origin=f"{origin}, made for verl {VERSION}, by `lightning-rl from-verl`",
            count=len(settings.values),
            notes=settings.notes,
            module=module,
            data=data,
            trainer=trainer,
            steps=steps,
            code=self.code,
        )

    def advantages(self) -> Call:
        """An estimator of groups."""
        name = self.settings["algorithm.adv_estimator"]
        if name not in ESTIMATORS:
            self.settings.refuse("algorithm.adv_estimator", f"expected one of {', '.join(ESTIMATORS)}, got {name!r}")
        deviation = self.settings["algorithm.norm_adv_by_std_in_grpo"]
        return Call(f"lightning_rl.{'DrGRPO' if name == 'grpo' and not deviation else ESTIMATORS.get(name, 'GRPO')}")

    def loss(self) -> Call:
        """By ``loss_mode``."""
        settings, clip = self.settings, {}
        for ours, theirs in (("clip_low", "clip_ratio_low"), ("clip_high", "clip_ratio_high")):
            bound = settings[f"{ACTOR}{theirs}"]
            clip[ours] = settings[f"{ACTOR}clip_ratio"] if bound is None else bound
        mode = settings[f"{ACTOR}policy_loss.loss_mode"]
        if mode == "gspo":
            return Call("lightning_rl.GSPO", {**clip, "per_token": True})
        if mode != "vanilla":
            settings.refuse(f"{ACTOR}policy_loss.loss_mode", f"expected vanilla or gspo, got {mode!r}")
        return Call("lightning_rl.ClippedSurrogate", {**clip, "dual_clip": settings[f"{ACTOR}clip_ratio_c"]})

    def reduction(self) -> Any:
        """By ``loss_agg_mode``; without a scale verl divides by the width that responses are padded to."""
        mode, length = self.settings[f"{ACTOR}loss_agg_mode"], self.settings[f"{ACTOR}loss_scale_factor"]
        lengths = {
            "seq-mean-token-sum": 1,
            "seq-mean-token-sum-norm": length or self.settings["data.max_response_length"],
        }
        if mode in lengths:
            return Call("lightning_rl.SequenceSumNorm", {"length": lengths[mode]})
        names = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
        if mode not in names:
            self.settings.refuse(
                f"{ACTOR}loss_agg_mode", f"expected one of {', '.join([*names, *lengths])}, got {mode!r}"
            )
        return names.get(mode, "token_mean")

    def corrections(self) -> list[Call]:
        """The callbacks that bend the signal."""
        settings, callbacks, corrections = self.settings, "lightning_rl.callbacks", []
        level = settings[f"{CORRECTION}rollout_is"]
        if level not in (None, "token", "sequence"):
            settings.refuse(f"{CORRECTION}rollout_is", f"expected token or sequence, got {level!r}")
        elif level is not None:
            options = {"level": level, "cap": settings[f"{CORRECTION}rollout_is_threshold"]}
            normalized = {"normalized": True} if settings[f"{CORRECTION}rollout_is_batch_normalize"] else {}
            corrections.append(Call(f"{callbacks}.TruncatedIS", {**options, **normalized}))
        if settings[f"{ACTOR}use_kl_loss"]:
            kind = settings[f"{ACTOR}kl_loss_type"]
            if kind not in KL:
                settings.refuse(f"{ACTOR}kl_loss_type", f"expected one of {', '.join(KL)}, got {kind!r}")
            if KL.get(kind) == "k3":
                settings.notes[f"{ACTOR}kl_loss_type"] = OPTIONS[f"{ACTOR}kl_loss_type"].says
            options = {"beta": settings[f"{ACTOR}kl_loss_coef"], "estimator": KL.get(kind), "as_loss": True}
            corrections.append(Call(f"{callbacks}.ReferenceKL", options))
        if settings[f"{ACTOR}entropy_coeff"]:
            corrections.append(Call(f"{callbacks}.EntropyBonus", {"coef": settings[f"{ACTOR}entropy_coeff"]}))
        if settings["algorithm.filter_groups.enable"]:
            corrections.append(Call(f"{callbacks}.DynamicSampling"))
        return corrections

    def sampling(self) -> Call:
        """How tokens are drawn."""
        options = {"temperature": self.settings[f"{ROLLOUT}temperature"], "top_p": self.settings[f"{ROLLOUT}top_p"]}
        options["top_k"] = max(self.settings[f"{ROLLOUT}top_k"], 0)
        usual = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        rest = {name: value for name, value in options.items() if value != usual[name]}
        return Call("lightning_rl.Sampling", {"max_new_tokens": self.settings["data.max_response_length"], **rest})

    def engine(self) -> dict[str, Any]:
        """VLLM, or the policy itself."""
        settings, name = self.settings, self.settings[f"{ROLLOUT}name"]
        if name == "hf":
            return {}
        if name == OPTIONS[f"{ROLLOUT}name"].default:
            settings.refuse(f"{ROLLOUT}name", "missing: vllm or hf, for verl has no default")
        elif name != "vllm":
            settings.refuse(f"{ROLLOUT}name", f"expected vllm or hf, got {name!r}")
        options = {"gpu_memory_utilization": settings[f"{ROLLOUT}gpu_memory_utilization"]}
        options["tensor_parallel_size"] = settings[f"{ROLLOUT}tensor_model_parallel_size"]
        options |= {"sleeps": settings[f"{ROLLOUT}free_cache_engine"]}
        longest = settings[f"{ROLLOUT}max_model_len"]
        return {
            "engine": Call("lightning_rl.VLLMEngine", {**options, **({"max_model_len": longest} if longest else {})})
        }

    def rewards(self) -> Any:
        """The scoring function of verl, or what is given."""
        path, name = (self.settings[f"reward.custom_reward_function.{part}"] for part in ("path", "name"))
        if path is None:
            if not self.given.rewards:
                reason = "missing: verl chooses by data_source; say which with --reward module.function"
                self.settings.refuse("reward.custom_reward_function.path", reason)
            named = {reward.rpartition(".")[2]: Named(reward) for reward in self.given.rewards}
            return next(iter(named.values())) if len(named) == 1 else named
        module = PurePath(str(path)).stem
        if not (module.isidentifier() and str(name).isidentifier()):
            self.settings.refuse("reward.custom_reward_function.path", f"expected a module, got {path!r}")
        self.settings.notes["reward.custom_reward_function.path"] = f"{module}.py has to lie beside the recipe"
        self.code += [f"from {module} import {name}", ADAPTER.format(name=name)]
        return Code("verl_score", ("lightning_rl.rewards.text_of",))

    def data(self) -> dict[str, Any]:
        """Prompts, in their order."""
        settings = self.settings
        prompts = self.given.prompts or self._file("data.train_files")
        options: dict[str, Any] = {"prompts": prompts, "prompts_per_rollout": settings["data.train_batch_size"]}
        options |= self._form()
        if not settings["data.shuffle"]:
            options["shuffle"] = False
        elif settings["data.seed"] is not None:
            options["seed"] = settings["data.seed"]
        return options

    def _form(self) -> dict[str, Any]:
        """From a row to a prompt, for training and evaluation."""
        settings = self.settings
        options: dict[str, Any] = {"max_prompt_tokens": settings["data.max_prompt_length"]}
        if settings["data.filter_overlong_prompts"]:
            options["too_long"] = "drop"
        if settings["data.prompt_key"] != "prompt":
            options["columns"] = {"prompt": settings["data.prompt_key"]}
        template = settings["data.apply_chat_template_kwargs"]
        return {**options, **({"chat_template_kwargs": template} if template else {})}

    def evaluation(self) -> dict[str, Any]:
        """Answers to the validation file."""
        settings, values = self.settings, f"{ROLLOUT}val_kwargs."
        if settings["trainer.test_freq"] <= 0:
            return {}
        sampling = {"max_new_tokens": settings["data.max_response_length"]}
        sampling |= {"temperature": settings[f"{values}temperature"], "top_p": settings[f"{values}top_p"]}
        prompts = Call("lightning_rl.data.PromptDataset", {"source": self._file("data.val_files"), **self._form()})
        options = {"name": "val", "prompts": prompts, "samples": settings[f"{values}n"]}
        options["sampling"] = Call("lightning_rl.Sampling", sampling)
        return {"evaluation": Call("lightning_rl.Evaluation", options)}

    def optimizer(self) -> Call:
        """AdamW."""
        lr, decay, betas = (self.settings[f"{ACTOR}optim.{name}"] for name in ("lr", "weight_decay", "betas"))
        options = {"lr": lr, "weight_decay": decay, "betas": tuple(betas), "fused": True}
        return Call("torch.optim.AdamW", options, bound=True)

    def trainer(self, per_rollout: int) -> dict[str, Any]:
        """Devices, precision, logging."""
        settings = self.settings
        options: dict[str, Any] = {"devices": settings["trainer.n_gpus_per_node"], "precision": "bf16-mixed"}
        if settings["trainer.nnodes"] > 1:
            options["num_nodes"] = settings["trainer.nnodes"]
        if settings[f"{ACTOR}strategy"] not in ("fsdp", "fsdp2"):
            settings.refuse(f"{ACTOR}strategy", f"expected fsdp or fsdp2, got {settings[f'{ACTOR}strategy']!r}")
        if settings["trainer.n_gpus_per_node"] * settings["trainer.nnodes"] > 1:
            options["strategy"] = "fsdp2"
        options["logger"] = self._loggers()
        if settings["trainer.test_freq"] > 0:
            options |= {"val_check_interval": settings["trainer.test_freq"] * per_rollout}
            options |= {"check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
        return options

    def _loggers(self) -> Any:
        settings = self.settings
        asked = settings["trainer.logger"]
        names = [name for name in ([asked] if isinstance(asked, str) else asked) if name != "console"]
        project, name = settings["trainer.project_name"], settings["trainer.experiment_name"]
        for unknown in [one for one in names if one not in LOGGERS]:
            settings.refuse("trainer.logger", f"expected console, {', '.join(LOGGERS)}, got {unknown!r}")
        kinds = [LOGGERS[one] for one in names if one in LOGGERS] or ["CSVLogger"]
        where = {"WandbLogger": {"project": project, "name": name}, "MLFlowLogger": {"run_name": name}}
        usual = {"save_dir": project, "name": name}
        loggers = [Call(f"lightning.pytorch.loggers.{kind}", where.get(kind, usual)) for kind in kinds]
        return loggers[0] if len(loggers) == 1 else loggers

    def _checkpoints(self, per_rollout: int) -> list[Call]:
        settings = self.settings
        if settings["trainer.save_freq"] <= 0:
            return []
        folder = settings["trainer.default_local_dir"]
        for name in ("project_name", "experiment_name"):
            folder = folder.replace(f"${{trainer.{name}}}", settings[f"trainer.{name}"])
        every = {"every_n_train_steps": settings["trainer.save_freq"] * per_rollout, "save_top_k": -1}
        return [Call("lightning.pytorch.callbacks.ModelCheckpoint", {"dirpath": folder, **every})]

    def _schedule(self) -> dict[str, Any]:
        warmup = self.settings[f"{ACTOR}optim.lr_warmup_steps"]
        if warmup <= 0:
            return {}
        kind = "constant_with_warmup"
        return {"lr_scheduler": Call("transformers.get_scheduler", {"num_warmup_steps": warmup}, (kind,), bound=True)}

    def _steps(self, per_rollout: int) -> tuple[str | None, Any]:
        rollouts = self.settings["trainer.total_training_steps"]
        if rollouts is not None:
            return None, rollouts * per_rollout
        epochs, prompts = self.settings["trainer.total_epochs"], self.settings["data.train_batch_size"]
        steps = f"{epochs} * (data.pass_length // {prompts})" + (f" * {per_rollout}" if per_rollout > 1 else "")
        return steps, Code("steps")

    def _file(self, name: str) -> Any:
        files = self.settings[name]
        files = files if isinstance(files, list) else [files]
        if len(files) != 1:
            self.settings.refuse(name, f"expected one file, got {len(files)}: join them first")
        return files[0]

    def _tokenizer(self) -> dict[str, Any]:
        path = self.settings[f"{MODEL}tokenizer_path"]
        return {} if path is None else {"tokenizer": path}
