"""Configuration of a run as plain values, for loggers and checkpoints."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import lightning
import torch
import transformers
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelSummary, ProgressBar
from lightning.pytorch.utilities import rank_zero_warn

from lightning_rl.corrections import RLCallback
from lightning_rl.data import PromptDataModule, PromptDataset, PromptStream
from lightning_rl.serialization import ABSENT, ARGUMENTS, CLASS, Plain, changes, describe, path_of
from lightning_rl.utils.trainer import CoreCallback, callbacks_of
from lightning_rl.version import __version__

FIXED = ("minibatches_per_rollout", "epochs_per_rollout")  # a checkpoint counts step indices in their product
FREE = {"engine", "evaluation", "model", "mismatch_every_n_rollouts"}
FREE_OF_PARTS = {
    "lightning_rl.environments.conversation_options.Conversations": (
        "workers",
        "step_timeout",
        "timeout",
        "max_failure_rate",
    ),
    "lightning_rl.rewards.code.CodeTests": ("parallel",),
    "lightning_rl.rewards.sandbox.Sandbox": ("workers",),
    "lightning_rl.rewards.scoring.Rewards": ("workers", "timeout", "max_failure_rate"),
    "lightning_rl.rewards.subprocess_reward.SubprocessReward": ("processes", "seconds"),
}  # by import path of their class
FREE_OF_DATA = {"validation", "validation_batch_size", "epoch_length"}
BESIDE = ("corrections", "data", "precision")  # compared on resume besides the options of the module
SHOWN = (CoreCallback, ModelSummary, ProgressBar)  # do not affect a run
Change = tuple[str, Any, Any]
"""Path of an option, its value in the checkpoint, and its value now."""
SHOWN_LETTERS = 80  # of a value in a message
LIMITS = ("max_epochs", "max_steps", "limit_train_batches", "val_check_interval", "log_every_n_steps")


def configuration(options: Mapping[str, object], trainer: Trainer) -> dict[str, Any]:
    """Return the configuration of a run at setup as plain values that load under ``weights_only=True``.

    Objects are described by their constructor arguments, functions by their import path. Secrets are omitted.

    Args:
        options: Options of the module by name.
        trainer: Trainer with callbacks and data.

    Returns:
        Dict with ``module``, ``data`` (None in an evaluation without a data module), ``corrections`` by name, other
        ``callbacks``, ``trainer`` and ``versions``.
    """
    callbacks = callbacks_of(trainer)
    datamodule = trainer.datamodule  # pyrefly: ignore[missing-attribute]
    corrections = [callback for callback in callbacks if isinstance(callback, RLCallback) and callback.affects]
    others = [callback for callback in callbacks if callback not in corrections and not isinstance(callback, SHOWN)]
    return {
        "module": {name: describe(value) for name, value in options.items()},
        "data": None if datamodule is None else describe_data(datamodule),
        "corrections": {
            callback.name: _describe_correction(callback)
            for callback in sorted(corrections, key=lambda callback: callback.name)
        },
        "callbacks": [describe(callback) for callback in others],
        "trainer": describe_trainer(trainer),
        "versions": versions(),
    }


def describe_data(data: PromptDataModule) -> dict[str, Plain]:
    """Return the options of a data module, and number, form and fingerprint of its rows."""
    validation = data.validation
    options = inspect.signature(type(data)).parameters.keys() & vars(data).keys() - {"prompts", "validation"}
    return {
        "class_path": path_of(type(data)),
        **{name: describe(getattr(data, name)) for name in sorted(options)},
        "prompts": _describe_prompts(data.prompts, data.fingerprint),
        "validation": None if validation is None else _describe_prompts(validation, validation.fingerprint),
    }


def describe_trainer(trainer: Trainer) -> dict[str, Plain]:
    """Return the Trainer options that affect a run: devices, strategy, precision, limits."""
    limits = {name: describe(value) for name, value in vars(trainer).items() if name in LIMITS}
    return {
        "strategy": path_of(type(trainer.strategy)),
        "accelerator": trainer.strategy.root_device.type,
        "ranks": trainer.world_size,
        "precision": str(trainer.precision),
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        **limits,
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that compute a run."""
    return {
        "lightning_rl": __version__,
        "torch": str(torch.__version__),
        "lightning": lightning.__version__,
        "transformers": transformers.__version__,
    }


def _describe_correction(callback: RLCallback) -> Plain:
    """Return a correction by its options, also if an earlier fit has changed some that adapt."""
    described: Any = describe(callback)
    described[ARGUMENTS] |= {
        option: describe(value) for option, value in callback.initial.items() if option in described[ARGUMENTS]
    }
    return described


def _describe_prompts(prompts: PromptDataset | PromptStream, fingerprint: str) -> dict[str, Plain]:
    return {
        "rows": None if isinstance(prompts, PromptStream) else len(prompts.rows),
        "fingerprint": fingerprint,
        "form": describe(prompts.form),
        "max_prompt_tokens": prompts.max_prompt_tokens,
        "too_long": prompts.too_long,
    }


def check_resume(before: Mapping[str, Any], now: Mapping[str, Any], allowed: Collection[str] = ()) -> list[Change]:
    """Compare the configuration of a resumed run with the checkpoint.

    Options that affect memory, speed, validation or the length of a run may change.

    Args:
        before: Configuration in the checkpoint.
        now: Configuration of the resumed run.
        allowed: Names of options that may differ.

    Returns:
        Differences that are allowed.

    Raises:
        ValueError: If another option differs.
    """
    differences = list(changes(_essence(before), _essence(now)))
    refuse_differences(differences, allowed)
    return differences


def refuse_differences(differences: Sequence[Change], allowed: Collection[str]) -> None:
    """Raise ValueError unless the options of all differences are allowed to differ."""
    names = dict.fromkeys(path.split(".")[0] for path, _, _ in differences)
    refused = [name for name in names if name not in allowed or name in FIXED]
    if refused:
        shown = [(path, *_show(old, new)) for path, old, new in differences]
        lines = [f"  {path}: {old} in the checkpoint, {new} now" for path, old, new in shown]
        fixed = [name for name in refused if name in FIXED]
        cure = f"or accept them with FaultTolerance(allow_config_changes={refused!r})"
        if fixed:
            cure = f"or start a new run from its weights, since {' and '.join(fixed)} cannot change within a run"
        raise ValueError(
            "expected the configuration of the checkpoint, got another one:\n"
            + "\n".join(lines)
            + f"\nset them back, {cure}"
        )


def warn_of_versions(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn if the configuration of a checkpoint states other versions of packages."""
    others = [f"{path} {old} -> {new}" for path, old, new in changes(before["versions"], now["versions"])]
    if others:
        rank_zero_warn(f"resumed with other versions ({', '.join(others)}), so results are not bitwise equal")


def _essence(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that must not change on resume, by the names in ``allow_config_changes``."""
    module = _fixed_part(configuration["module"], FREE)
    data = {name: value for name, value in configuration["data"].items() if name not in FREE_OF_DATA}
    precision = configuration["trainer"]["precision"]
    return {**module, "corrections": configuration["corrections"], "data": data, "precision": precision}


def _fixed_part(described: Any, free: Collection[str] = ()) -> Any:
    """Return a description without the options ``free``, and without those of its parts that may change."""
    if isinstance(described, list):
        return [_fixed_part(value) for value in described]
    if not isinstance(described, Mapping):
        return described
    below = FREE_OF_PARTS.get(str(described.get(CLASS)), ())
    return {
        name: _fixed_part(value, below if name == ARGUMENTS else ())
        for name, value in described.items()
        if name not in free
    }


def _show(*values: Any) -> list[str]:
    """Return the text of two different values, cut to a part in which they differ."""
    texts = [_text(value) for value in values]
    if len(set(texts)) == 1:  # classes of one name
        texts = [repr(value) for value in values]
    pairs = zip_longest(*texts)
    same = next(place for place, letters in enumerate(pairs) if len(set(letters)) > 1)
    begin = 0 if same < SHOWN_LETTERS // 2 else same - SHOWN_LETTERS // 4
    return [f"{'...' if begin else ''}{text[begin : begin + SHOWN_LETTERS]}" for text in texts]


def _text(value: Any) -> str:
    if isinstance(value, Mapping) and CLASS in value:
        return str(value[CLASS]).rpartition(".")[2]
    return value if value is ABSENT else repr(value)
