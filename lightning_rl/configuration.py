"""Configuration: everything that makes a run what it is, in plain values, for loggers and checkpoints."""

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import lightning
import torch
import transformers
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelSummary, ProgressBar

from lightning_rl.checkpointing import Interrupts
from lightning_rl.corrections import RLCallback
from lightning_rl.data import PromptDataModule, PromptDataset, PromptStream
from lightning_rl.description import Plain, describe, path_of
from lightning_rl.metrics import callbacks_of
from lightning_rl.version import __version__

SHOWN = (Interrupts, ModelSummary, ProgressBar)  # change nothing of a run
LIMITS = ("max_epochs", "max_steps", "limit_train_batches", "val_check_interval", "log_every_n_steps")


class Configurable(Protocol):
    """A module that keeps what its constructor took."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Every argument of the constructor by its name, with names and defaults resolved."""
        ...


def configuration(module: Configurable, trainer: Trainer) -> dict[str, Any]:
    """Everything that makes a run what it is, in plain values that load under ``weights_only=True``.

    Objects are described by what their constructors took, functions by where they lie; numbers that move during a run
    are those of the moment, so it is taken at setup. Secrets are left out.

    Args:
        module: of the run.
        trainer: that holds callbacks and data.

    Returns:
        ``module``, ``data`` (None in an evaluation without), ``corrections`` by their names, other ``callbacks``,
        ``trainer``, ``versions``.
    """
    callbacks = callbacks_of(trainer)
    datamodule = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
    others = [callback for callback in callbacks if not isinstance(callback, (RLCallback, *SHOWN))]
    return {
        "module": {name: describe(value) for name, value in module.options.items()},
        "data": None if datamodule is None else describe_data(datamodule),
        "corrections": {
            callback.name: describe(callback)
            for callback in sorted(callbacks, key=lambda callback: callback.state_key)
            if isinstance(callback, RLCallback)
        },
        "callbacks": [describe(callback) for callback in others],
        "trainer": describe_trainer(trainer),
        "versions": versions(),
    }


def describe_data(data: PromptDataModule) -> dict[str, Plain]:
    """The options of a data module, and for its rows their number, their form and their fingerprint."""
    validation = data.validation
    options = inspect.signature(type(data)).parameters.keys() & vars(data).keys() - {"prompts", "validation"}
    return {
        "class_path": path_of(type(data)),
        **{name: describe(getattr(data, name)) for name in sorted(options)},
        "prompts": _describe_prompts(data.prompts, data.fingerprint),
        "validation": None if validation is None else _describe_prompts(validation, validation.fingerprint),
    }


def describe_trainer(trainer: Trainer) -> dict[str, Plain]:
    """What of a Trainer bends a run: devices, strategy, precision, limits."""
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
    """Of what computes a run."""
    return {
        "lightning_rl": __version__,
        "torch": str(torch.__version__),
        "lightning": lightning.__version__,
        "transformers": transformers.__version__,
    }


def _describe_prompts(prompts: PromptDataset | PromptStream, fingerprint: str) -> dict[str, Plain]:
    return {
        "rows": None if isinstance(prompts, PromptStream) else len(prompts.rows),
        "fingerprint": fingerprint,
        "form": describe(prompts.form),
        "max_prompt_tokens": prompts.max_prompt_tokens,
        "too_long": prompts.too_long,
    }
