"""Translation of a GRPOConfig of TRL to the source of a recipe."""

import ast
import itertools
import json
import math
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from lightning_rl.translation.trl_options import FURTHER, OLDER, OLDER_BETA, OPTIONS, RENAMED, VERSION
from lightning_rl.translation.trl_script import Function, SourceLine, TrainerScript, cells_of, read_script

ROWS = "per_device_train_batch_size"
EPSILON = 1e-4  # added to standard deviations by TRL
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
SIGNS = {"positive": "pos", "negative": "neg"}
LOGGERS = {"tensorboard": "TensorBoardLogger", "wandb": "WandbLogger", "mlflow": "MLFlowLogger"}
LOGGERS |= {"comet_ml": "CometLogger", "none": "CSVLogger"}
TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
OVERLONG = {"max_completion_len": 1280, "soft_punish_cache": 256}  # trl grpo's get_soft_overlong_punishment
KNOWN = OPTIONS | FURTHER
NAMES = {"data", "module", "policy", "steps", "trainer"}  # of a recipe
REMEDIES = {"dataset_name": "save its rows and pass --prompts", "model_name_or_path": "pass --model"}
COMMAND = "write the options of a command as YAML, learning_rate: 1e-5 for --learning_rate 1e-5, or pass its script"
TEXTS = ("output_dir", "run_name", "dataset_name", "dataset_config", "model_name_or_path", "system_prompt")
TRUTH = dict.fromkeys(("true", "yes", "t", "y"), True) | dict.fromkeys(("false", "no", "f", "n"), False)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
FLASH = ("flash_attention_", "kernels-community/")
OPEN_R1 = {
    "accuracy": ("MathMatch", {"answer": "solution"}),
    "format": ("RegexMatch", {"pattern": r"(?sm)\A<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"}),
    "tag_count": ("TagFormat", {"partial": True}),
}
"""Rewards of open-r1 with an equal or nearly equal one here."""
OPEN_R1_FACTORIES = {
    "cosine": (
        "get_cosine_scaled_reward",
        {f"{x}_value_{y}": f"cosine_{x}_value_{y}" for x in ("min", "max") for y in ("wrong", "correct")}
        | {"max_len": "cosine_max_len"},
    ),
    "repetition_penalty": (
        "get_repetition_penalty_reward",
        {"ngram_size": "repetition_n_grams", "max_penalty": "repetition_max_penalty"},
    ),
    "code_format": ("get_code_format_reward", {"language": "code_language"}),
    "soft_overlong_punishment": (
        "get_soft_overlong_punishment",
        {"max_completion_len": "max_completion_len", "soft_punish_cache": "soft_punish_cache"},
    ),
}
"""Functions of open-r1 that return a reward, with the names of their options."""
OPEN_R1_FUNCTIONS = {"reasoning_steps": "reasoning_steps_reward", "length": "len_reward", "code": "code_reward"}
OPEN_R1_FUNCTIONS |= {f"{name}": f"{name}_reward" for name in ("binary_code", "ioi_code", "cf_code")}
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
    path: Path,
    devices: int = 1,
    model: str | None = None,
    rewards: Sequence[str] = (),
    prompts: str | None = None,
    ignore: Collection[str] = (),
) -> tuple[str, dict[str, str]]:
    """Translate a script or notebook with a GRPOTrainer, or YAML or JSON for ``trl grpo --config``.

    Return the source of the recipe, and differences from TRL by the names of the options.

    Args:
        path: Path of the configuration.
        devices: Number of processes of the run.
        model: Name or folder of the policy, instead of that of the configuration.
        rewards: Dotted names of reward functions, instead of those of the configuration.
        prompts: File or data set of prompts, instead of that of the configuration.
        ignore: Names of options and of refused statements (``line7``) to leave out; the recipe lists them.

    Raises:
        RefusedError: With the reason for each refused option.
        UnreadableError: If the file is not a configuration.
    """
    script, is_script = TrainerScript({}, "", frozenset()), path.suffix in (".py", ".ipynb")
    try:
        text = path.read_text(encoding="utf-8")
        if is_script:
            script = read_script(text if path.suffix == ".py" else cells_of(text))
        values = script.options if is_script else yaml.safe_load(text)
    except (OSError, ValueError, SyntaxError, RecursionError, KeyError, TypeError, yaml.YAMLError) as error:
        cure = "" if is_script else f"; {COMMAND}"
        raise UnreadableError(f"expected {path} to be a script, YAML or JSON, got an error: {error}{cure}") from error
    if not isinstance(values, dict):
        raise UnreadableError(f"expected {path} to hold options by name, got {type(values).__name__}: {COMMAND}")
    left_out = {name: value for name, value in values.items() if name in ignore}
    values = {name: value for name, value in values.items() if name not in ignore}
    if rewards:
        values = {**values, "reward_funcs": list(rewards), "reward_model_name_or_path": None}
    if prompts:
        values = {**values, "dataset_name": prompts, "dataset_config": None}
    if model:
        values["model_name_or_path"] = model
    left_out = {name: value for name, value in left_out.items() if name not in values}
    writer = _Writer(values, devices, script if not rewards else TrainerScript({}, "", frozenset()), left_out)
    for name in left_out:
        line = script.options.get(name)
        writer.notes[name] = f"left out by --ignore{f'; {line.text}' if isinstance(line, SourceLine) else ''}"
    return writer.script(path.name), writer.notes


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

    def __init__(
        self, values: Mapping[str, Any], devices: int, script: TrainerScript, left_out: Mapping[str, Any] = {}
    ) -> None:
        self.devices, self.left_out = devices, left_out
        self.definitions = script.definitions
        self.notes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        renamed = {new: values[old] for old, new in RENAMED.items() if values.get(old) is not None}
        self.notes |= {old: f"the older name of {RENAMED[old]}" for old in values if old in RENAMED}
        if "beta" not in values and (older := [name for name in values if name in OLDER]):
            self.notes["beta"] = (
                f"{older[0]} is of older versions of TRL, many of which had beta={OLDER_BETA} by default: this recipe "
                f"has no KL term; for that of such a run, add ReferenceKL(beta={OLDER_BETA}, as_loss=True)"
            )
        self.values = renamed | {name: value for name, value in values.items() if name not in RENAMED}
        self.values = {name: self.value_of(name, value) for name, value in self.values.items()}
        if script.names & NAMES:
            taken = ", ".join(sorted(script.names & NAMES))
            self.refuse(
                "reward_funcs", f"expected other names than the recipe's {taken}: move them to a module, --reward"
            )
        for name, value in self.values.items():
            option, near = KNOWN.get(name), get_close_matches(name, [*KNOWN, *RENAMED], n=1, cutoff=0.8)
            if isinstance(value, SourceLine) and value.harmless:
                self.notes[name] = value.text
            elif isinstance(value, SourceLine):
                self.refuse(name, value.text)
            elif option is None and not isinstance(value, ast.expr):
                hint = f"; did you mean {near[0]}?" if near else ""
                self.refuse(name, f"no option of TRL {VERSION}'s GRPOConfig or trl grpo{hint}")
            elif option is not None and option.verdict == "refused" and value != option.default:
                self.refuse(name, option.note)
            elif isinstance(value, ast.expr) and (option is None or option.verdict != "different" or option.ours):
                cure = f"; {REMEDIES[name]}" if name in REMEDIES else ""
                self.refuse(name, f"expected a literal value, got {ast.unparse(value)}{cure}")
            elif option is not None and option.verdict == "different" and value != option.default:
                self.notes[name] = option.note

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name, KNOWN[name].default)

    def refuse(self, name: str, reason: str) -> None:
        """Record a refused option; the first reason is kept."""
        self.reasons.setdefault(name, reason)

    def value_of(self, name: str, value: Any) -> Any:
        """Return a text as a number or truth value if the option is one, as the parser of ``trl grpo`` reads it."""
        default = KNOWN[name].default if name in KNOWN else value
        if isinstance(value, list) and default is None:
            return [self.value_of(name, part) for part in value]
        if not isinstance(value, str) or name in TEXTS or not isinstance(default, int | float | None):
            return value
        if not isinstance(default, int | float) or isinstance(default, bool):
            value = TRUTH.get(value.lower(), value)
        for kind in (int, float) if isinstance(value, str) and not isinstance(default, bool) else ():
            try:
                return kind(value)
            except ValueError:
                continue
        if isinstance(value, str) and default is not None:
            self.refuse(name, f"expected a {'truth value' if isinstance(default, bool) else 'number'}, got {value!r}")
        return value

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
        module: dict[str, Any] = {
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
        parts[:0] = [self.definitions + "\n\n"] if self.definitions else []
        parts += [builder] if (builder := module.pop("builder", "")) else []
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
        return '"""' + "\n".join(lines).replace("\\", "\\\\").replace('"' * 3, "'" * 3) + '"""'

    # The algorithm.

    def advantages(self) -> _Source:
        """Return the estimator, with TRL's epsilon."""
        group, none = _call("lightning_rl.GRPO", epsilon=EPSILON), _call("lightning_rl.DrGRPO")
        batch = _call("lightning_rl.Normalized", std="batch", epsilon=EPSILON)
        if self.choose("multi_objective_aggregation", {"sum_then_normalize": False, "normalize_then_sum": True}):
            return _call("lightning_rl.Normalized", mean="batch", std="batch", epsilon=EPSILON)
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
        if self["multi_objective_aggregation"] == "normalize_then_sum":
            weights = dict(zip(self.reward_parts(), self["reward_weights"] or itertools.repeat(1.0), strict=False))
            normalization = {"epsilon": EPSILON, "weights": weights}
            calls.append(_call(f"{callbacks}.RewardNormalization", "group", "group", **normalization))
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

    def rows_per_device(self) -> int:
        """Return the rows of a microbatch; refuse them if a device's step has no whole number of groups."""
        rows, group, accumulation = self[ROWS], self["num_generations"], self["gradient_accumulation_steps"]
        if not rows * accumulation % group:
            return rows
        wanted, unit = self.value_of(ROWS, self.left_out.get(ROWS, rows)), group // math.gcd(group, accumulation)
        below = wanted // unit * unit if isinstance(wanted, int) else 0
        sizes = [size for size in (below, below + unit) if size]
        if ROWS not in self.left_out:
            reason = f"expected whole groups of {group} in the {rows} x {accumulation} rows of a step on each device"
            taken = sizes[0] if OPTIONS[ROWS].default * accumulation % group else OPTIONS[ROWS].default
            self.refuse(ROWS, f"{reason}: set it to {' or '.join(map(str, sizes))}, or --ignore it for {taken}")
            return rows
        self.values[ROWS] = sizes[0]
        self.notes[ROWS] = f"left out by --ignore; {sizes[0]} rows make whole groups on each device"
        return sizes[0]

    def rollout(self) -> tuple[int, dict[str, int]]:
        """Return the number of prompts per rollout, and minibatches and epochs if they are not 1."""
        rows, group = self.rows_per_device() * self.devices, self["num_generations"]
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
        if kind != "linear" or self["lr_scheduler_kwargs"]:
            self.notes.pop("warmup_steps", None)
        if 0 < warmup < 1:
            warmup = _Source(f"{_name('math.ceil')}({warmup} * steps)") if steps else math.ceil(warmup * total)
        more = self["lr_scheduler_kwargs"]
        if kind == "linear" and not more:
            schedule = _partial("lightning_rl.optimizers.WarmupThenLinear", warmup=warmup, total=total)
        else:
            counts = {"num_warmup_steps": warmup, "num_training_steps": total}
            counts |= {"scheduler_specific_kwargs": more} if more else {}
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
        if self["max_prompt_length"] is not None:
            data |= {"max_prompt_tokens": self["max_prompt_length"], "too_long": "drop"}
        if self["dataset_prompt_column"] != "prompt":
            data |= {"columns": {"prompt": self["dataset_prompt_column"]}}
        if self["system_prompt"]:
            data |= {"system": self["system_prompt"]}
        elif "dataset_prompt_column" in self.values:
            data |= {"chat": True}
        seed = self["seed"] if self["data_seed"] is None else self["data_seed"]
        data |= {"seed": seed} if self["shuffle_dataset"] else {"shuffle": False}
        return data | ({"chat_template_kwargs": template} if template else {})

    def policy(self) -> dict[str, Any]:
        """Return the policy, with its tokenizer if either is built with options, and the function of an adapter."""
        name = self["model_name_or_path"]
        options = {"dtype": self["dtype"], "attn_implementation": self["attn_implementation"]}
        options |= {"revision": self["model_revision"], **(self["model_init_kwargs"] or {})}
        options |= {"dtype": options.pop("torch_dtype")} if "torch_dtype" in options else {}
        options = {option: value for option, value in options.items() if value not in (None, "main", "float32")}
        if str(options.get("attn_implementation")).startswith(FLASH):
            options.pop("attn_implementation")
            self.notes["attn_implementation"] = "FlashAttention is used wherever it is installed"
        if name is None:
            self.refuse("model_name_or_path", "missing: pass it with --model")
        if options.get("trust_remote_code"):
            self.refuse("model_init_kwargs", OPTIONS["trust_remote_code"].note)
        built: dict[str, Any] = {"policy": name, "tokenizer": name}
        load = "transformers.AutoModelForCausalLM.from_pretrained"
        if options:
            built["policy"] = _partial(load, name, **options)
        if self["use_peft"] or self["peft_config"]:
            built |= {"policy": _Source("policy"), "builder": self.adapter(_call(load, name, **options))}
        if self["chat_template"]:
            template = {"chat_template": self["chat_template"]}
            load = "transformers.AutoTokenizer.from_pretrained"
            built["tokenizer"] = _call(load, self["processing_class"] or name, **template)
        elif self["processing_class"]:
            built["tokenizer"] = self["processing_class"]
        return built if built != {"policy": name, "tokenizer": name} else {"policy": name}

    def adapter(self, model: _Source) -> str:
        """Return the function that builds the policy with its adapter."""
        options = {name: self[f"lora_{name.removeprefix('lora_')}"] for name in ("r", "lora_alpha", "lora_dropout")}
        more = {
            f"lora_{name}": name for name in ("task_type", "target_modules", "target_parameters", "modules_to_save")
        }
        more |= {"use_rslora": "use_rslora", "use_dora": "use_dora"}
        options |= {name: self[option] for option, name in more.items() if self[option]}
        options = {name: value for name, value in (self["peft_config"] or options).items() if value is not None}
        for name, value in options.items():
            if isinstance(value, ast.expr):
                self.refuse("peft_config", f"expected literal options, got {name}={ast.unparse(value)}")
        if options.get("lora_dropout"):
            options["lora_dropout"] = 0.0
            self.notes["lora_dropout"] = OPTIONS["lora_dropout"].note
        targets = options.get("target_modules")
        options |= {"target_modules": targets[0]} if targets == ["all-linear"] else {}
        config = _call("peft.LoraConfig", **options)
        return f"\n\ndef policy():\n    return {_name('peft.get_peft_model')}({model}, {config})\n\n"

    def reward_parts(self) -> dict[str, Any]:
        """Return the rewards by name."""
        names, model = self["reward_funcs"] or [], self["reward_model_name_or_path"]
        parts = {"reward_model": _call("lightning_rl.rewards.RewardModel", model=model)} if model else {}
        return parts | dict(map(self.reward, names if isinstance(names, list) else [names]))

    def rewards(self) -> Any:
        """Return the rewards by name, each with its weight."""
        parts = self.reward_parts()
        weights = self["reward_weights"] or [1.0] * len(parts)
        if len(weights) != len(parts):
            self.refuse("reward_weights", f"expected {len(parts)}, one for each reward by its name, got {len(weights)}")
        if not parts:
            self.refuse("reward_funcs", "missing: pass it with --reward module.function")
        if weights == [1.0]:
            return next(iter(parts.values()), None)
        weighted = zip(parts.items(), weights, strict=False)
        return {name: part if weight == 1.0 else (part, weight) for (name, part), weight in weighted}

    def reward(self, name: str | Function) -> tuple[str, Any]:
        """Return name and function of a reward: of the script, of TRL or open-r1, a dotted name, or a reward model."""
        if isinstance(name, Function):
            return name.name, _Source(name.source)
        if name in OPEN_R1:
            kind, options = OPEN_R1[name]
            self.notes[f"reward_funcs {name}"] = f"the reward {kind} of lightning-rl is used"
            return name, _call(f"lightning_rl.rewards.{kind}", **options)
        if name in (OPEN_R1_FACTORIES | OPEN_R1_FUNCTIONS):
            self.notes[f"reward_funcs {name}"] = "imported from the package open_r1, or pass --reward"
        if name in OPEN_R1_FACTORIES:
            path, options = OPEN_R1_FACTORIES[name]
            return name, _call(f"open_r1.rewards.{path}", **{ours: self[option] for ours, option in options.items()})
        if name in OPEN_R1_FUNCTIONS:
            return name, _name(f"open_r1.rewards.{OPEN_R1_FUNCTIONS[name]}")
        if name == "get_soft_overlong_punishment":
            return name, _call(f"trl.rewards.{name}", **OVERLONG)
        path = f"trl.rewards.{name}" if name in TRL_REWARDS else str(name)
        if "/" in path:
            return path.rpartition("/")[2], _call("lightning_rl.rewards.RewardModel", model=path)
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
        shared = (
            {} if urlsplit(str(url)).hostname in LOOPBACK else {"storage": f"{self['output_dir'] or 'out'}/weights"}
        )
        if shared and self["vllm_mode"] == "server":
            self.notes["vllm_server_host"] = "storage= has to be a folder that trainer and servers share"
        patience = {"patience": self["vllm_server_timeout"]}
        server = _call("lightning_rl.VLLMServerEngine", servers=url, **patience, **shared)
        return {"engine": self.choose("vllm_mode", {"colocate": colocate, "server": server})}

    # The rest.

    def optimizer(self) -> _Source:
        """Return the optimizer."""
        options = {"lr": self["learning_rate"], "weight_decay": self["weight_decay"]}
        betas, epsilon = (self["adam_beta1"], self["adam_beta2"]), self["adam_epsilon"]
        adam = {**options, "betas": betas} if betas != (0.9, 0.999) else options
        adam = {**adam, "eps": epsilon} if epsilon != 1e-8 else adam
        choices = dict.fromkeys(("adamw_torch", "adamw_torch_fused"), _partial("torch.optim.AdamW", **adam, fused=True))
        plain = ("adamw_hf", "paged_adamw", "paged_adamw_32bit", "adamw_torch_8bit", "paged_adamw_8bit")
        if self["optim"] in plain:
            self.notes["optim"] = "its states are neither paged nor, except for the 8-bit ones, of another precision"
        choices |= dict.fromkeys(plain[:3], choices["adamw_torch"])
        choices |= dict.fromkeys((*plain[3:], "adamw_bnb_8bit", "adamw_8bit"), _call("lightning_rl.adamw_8bit", **adam))
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
        loggers = list(dict.fromkeys(self.logger(name) for name in names or ["none"]))
        logger = loggers[0] if len(loggers) == 1 else loggers
        return {**options, "logger": logger, "log_every_n_steps": int(self["logging_steps"])}

    def logger(self, kind: str) -> _Source:
        """Return a logger of Lightning."""
        if kind not in LOGGERS:
            self.notes["report_to"] = f"Lightning has no logger for {kind}: CSVLogger writes files"
            kind = "none"
        options = {} if kind in ("mlflow", "comet_ml") else {"save_dir": self["output_dir"] or "trainer_output"}
        options |= {"project": self["project"]} if kind == "wandb" else {}
        if self["run_name"] and kind != "comet_ml":
            options |= {"run_name" if kind == "mlflow" else "name": self["run_name"]}
        return _call(f"lightning.pytorch.loggers.{LOGGERS[kind]}", **options)

    def checkpoints(self) -> list[_Source]:
        """Return the callback that saves checkpoints."""
        limit, folder = self["save_total_limit"], self["output_dir"] or "trainer_output"
        keep = {"save_top_k": -1} if limit is None else {"monitor": "step", "mode": "max", "save_top_k": limit}
        steps = {"every_n_train_steps": int(self["save_steps"])}
        often = self.choose("save_strategy", {"no": None, "steps": steps, "epoch": {"every_n_epochs": 1}})
        saves = _call("lightning.pytorch.callbacks.ModelCheckpoint", dirpath=folder, **(often or {}), **keep)
        return [saves] if often else []
