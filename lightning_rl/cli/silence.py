"""Silence: what a Trainer shows and writes, replaced by what looks the same to callbacks and does nothing."""

from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelSummary, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from typing_extensions import override

from lightning_rl.metrics import callbacks_of


class Silent(Logger):
    """Takes everything and writes nothing; mixed into a logger's own class by :func:`silent_logger`."""

    @property
    def experiment(self) -> Any:
        """Something that takes every call."""
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
    """Keeps a Trainer from showing or writing anything, for callbacks that demand a logger, its class or its folder."""
    trainer.loggers = [silent_logger(logger) for logger in trainer.loggers]
    vars(trainer)["callbacks"] = [callback for callback in callbacks_of(trainer) if _stays(callback)]


def silent_logger(logger: Logger) -> Logger:
    """A logger of the same class, name, version and folder, without its effects."""
    kind = type(f"Silent{type(logger).__name__}", (Silent, type(logger)), {})
    twin = object.__new__(kind)
    vars(twin).update(vars(logger))
    return twin


def _stays(callback: Callback) -> bool:
    """Whether a callback cannot show anything; a progress bar that cannot be switched off has to go."""
    if isinstance(callback, ProgressBar) and type(callback).disable is not ProgressBar.disable:
        callback.disable()
        return True
    return not isinstance(callback, ModelSummary | ProgressBar)
