"""Callbacks and progress bars of a Trainer."""

import sys
from pathlib import Path
from typing import TypeVar

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.utilities import rank_zero_info

CallbackT = TypeVar("CallbackT", bound=Callback)
OWN = ("lightning", "lightning_rl")  # packages
PHASE_WIDTH = len("generate")  # keeps the bar in place


class CoreCallback(Callback):
    """Callback without options that every run has, so that it is no part of a configuration."""


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the trainer's callbacks, an attribute that Lightning does not declare."""
    return trainer.callbacks  # pyrefly: ignore[missing-attribute]


def is_own(part: object) -> bool:
    """Return True if the object's class belongs to this library or to Lightning."""
    return type(part).__module__.partition(".")[0] in OWN


def log_folder(trainer: Trainer) -> Path:
    """Return the folder of the first logger, or ``default_root_dir`` without a logger."""
    return Path(trainer.log_dir or trainer.default_root_dir)


def has_terminal() -> bool:
    """Return True if the output is a terminal or a notebook, where a progress bar can be drawn again in place."""
    return "ipykernel" in sys.modules or bool(sys.stdout and sys.stdout.isatty())


def disable_bar(trainer: Trainer) -> None:
    """Disable Lightning's progress bar if the output is a file, where each refresh would be one more line."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar | RichProgressBar) and not has_terminal():
        bar.disable()


def show_phase(trainer: Trainer, rollout: int, phase: str) -> None:
    """Show rollout number and phase before Lightning's tqdm or rich training bar.

    It is refreshed at once, since no batch ends during generation.
    """
    bar, text = trainer.progress_bar_callback, f"Rollout {rollout} {phase:<{PHASE_WIDTH}}"
    if isinstance(bar, TQDMProgressBar) and bar.is_enabled:
        bar.train_progress_bar.set_description(text)
    elif isinstance(bar, RichProgressBar) and bar.progress is not None and bar.train_progress_bar_id is not None:
        bar.progress.update(bar.train_progress_bar_id, description=text)


def show_line(trainer: Trainer, text: str) -> None:
    """Print text on the first rank, above the progress bar if there is one."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar | RichProgressBar) and bar.is_enabled:
        bar.print(text)
    else:
        rank_zero_info(text)


def add_first(trainer: Trainer, kind: type[Callback]) -> None:
    """Move the trainer's callback of a class before the others, or create it there if there is none."""
    callbacks = callbacks_of(trainer)
    present = [callback for callback in callbacks if isinstance(callback, kind)] or [kind()]
    callbacks[:] = [*present, *(callback for callback in callbacks if callback not in present)]


def add_missing(trainer: Trainer, kind: type[CallbackT]) -> tuple[list[CallbackT], CallbackT]:
    """Return the callbacks to add for a class, none if the trainer has one, and the callback of the run.

    Raises:
        ValueError: If the trainer has several.
    """
    present = [callback for callback in callbacks_of(trainer) if isinstance(callback, kind)]
    if len(present) > 1:
        raise ValueError(f"expected one {kind.__name__} in callbacks=, got {len(present)}: pass all options to one")
    added = [] if present else [kind()]
    return added, (*present, *added)[0]
