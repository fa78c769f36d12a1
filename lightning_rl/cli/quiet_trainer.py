"""Replacement of a Trainer's loggers and displays by ones without effects."""

from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelSummary, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from typing_extensions import override

from lightning_rl.utils.trainer import callbacks_of


class Silent(Logger):
    """Logger without effects; mixed into a logger's own class by :func:`silent_logger`."""

    @property
    def experiment(self) -> Any:
        """Object that accepts every call."""
        return DummyLogger().experiment

    @override
    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        return

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        return

    @override
    def log_graph(self, *args: Any, **kwargs: Any) -> None:
        return

    @override
    def save(self) -> None:
        return

    @override
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        return

    @override
    def finalize(self, status: str) -> None:
        return


def silence(trainer: Trainer) -> None:
    """Remove all output of a Trainer; callbacks still find a logger of the same class and folder."""
    trainer.loggers = [silent_logger(logger) for logger in trainer.loggers]
    vars(trainer)["callbacks"] = [callback for callback in callbacks_of(trainer) if _stays(callback)]


def silent_logger(logger: Logger) -> Logger:
    """Return a logger of the same class, name, version and folder, without effects."""
    kind = type(f"Silent{type(logger).__name__}", (Silent, type(logger)), {})
    twin = object.__new__(kind)
    vars(twin).update(vars(logger))
    return twin


def _stays(callback: Callback) -> bool:
    """Return True if a callback displays nothing; a progress bar is disabled, or removed if it cannot be."""
    if isinstance(callback, ProgressBar) and type(callback).disable is not ProgressBar.disable:
        callback.disable()
        return True
    return not isinstance(callback, ModelSummary | ProgressBar)
