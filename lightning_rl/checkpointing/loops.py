"""Lightning loops that end with the data and not at a StopIteration of user code.

Lightning's loops call all code of a run: hooks, rewards, losses, engines, optimizers, schedulers and savers. They take
a StopIteration of any of these for the end of the data, and count the fit as finished or the step as made. Lightning
raises its own in the loops and the combined loader; any other becomes an error.
"""

from collections.abc import Callable, Iterator
from traceback import walk_tb
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

ENDS = ("lightning.pytorch.loops.", "lightning.pytorch.utilities.combined_loader")
"""Modules of Lightning that raise StopIteration at the end of the data or an epoch."""

GENERATOR = "generator raised StopIteration"
"""Message of the RuntimeError that Python raises for a StopIteration in a generator."""


class WholeFitLoop(_FitLoop):
    """Epoch loop with the check of :func:`protect_loops`."""

    @override
    def run(self) -> None:
        """Train, and warn if the checkpoint leaves nothing to train, which Lightning does not report."""
        if self.restarting and self.done:
            rank_zero_warn(
                f"nothing is left to train: the checkpoint is at step {self.trainer.global_step} with "
                f"max_steps={self.max_steps}, and {self.epoch_progress.current.completed} of "
                f"max_epochs={self.max_epochs} are complete: raise the limit that is reached"
            )
        super().run()

    @override
    def on_advance_start(self) -> None:
        epochs: Any = self.epoch_progress
        try:
            refuse_stops(super().on_advance_start)
        except BaseException:
            for count in (epochs.current, epochs.total):  # undo the epoch that did not start
                count.ready = count.started
            raise

    @override
    def advance(self) -> None:
        refuse_stops(super().advance)

    @override
    def on_advance_end(self) -> None:
        refuse_stops(super().on_advance_end)


class WholeEpochLoop(_TrainingEpochLoop):
    """Optimizer step loop with the check of :func:`protect_loops`."""

    @override
    def advance(self, data_fetcher: Any) -> None:
        refuse_stops(super().advance, data_fetcher)

    @override
    def on_advance_end(self, data_fetcher: Any) -> None:
        refuse_stops(super().on_advance_end, data_fetcher)


class WholeStepLoop(_ManualOptimization):
    """Manual optimization loop with the check of :func:`protect_loops`."""

    @override
    def advance(self, kwargs: Any) -> None:
        refuse_stops(super().advance, kwargs)


class WholeEvaluationLoop(_EvaluationLoop):
    """Validation and test loop with the check of :func:`protect_loops`."""

    @override
    def _evaluation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Iterator[Any] | None
    ) -> None:
        refuse_stops(super()._evaluation_step, batch, batch_idx, dataloader_idx, dataloader_iter)


class WholePredictionLoop(_PredictionLoop):
    """Prediction loop with the check of :func:`protect_loops`."""

    @override
    def _predict_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Iterator[Any] | None
    ) -> None:
        refuse_stops(super()._predict_step, batch, batch_idx, dataloader_idx, dataloader_iter)


def protect_loops(trainer: Trainer) -> None:
    """Make the loops of a Trainer raise an error for a StopIteration of user code.

    Replaces the classes of this Trainer's loop objects; other Trainers are unchanged.
    """
    epoch = trainer.fit_loop.epoch_loop
    _protect(trainer.fit_loop, WholeFitLoop)
    _protect(epoch, WholeEpochLoop)
    _protect(epoch.manual_optimization, WholeStepLoop)
    for loop in (epoch.val_loop, trainer.validate_loop, trainer.test_loop):
        _protect(loop, WholeEvaluationLoop)
    _protect(trainer.predict_loop, WholePredictionLoop)


def _protect(loop: Any, whole: type) -> None:
    kind = type(loop)
    if not isinstance(loop, whole):
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        loop.__class__ = type(kind.__name__, (whole, kind), names)


def refuse_stops(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function and convert a StopIteration into an error, unless Lightning raised it.

    This is not a context manager, because ``contextlib`` treats a StopIteration in its body specially.

    Raises:
        RuntimeError: Naming the function that leaked the StopIteration, which is the cause.
    """
    try:
        function(*arguments)
    except (StopIteration, RuntimeError) as error:
        stop = error.__cause__ if str(error) == GENERATOR else error
        if not isinstance(stop, StopIteration):
            raise
        frame = list(walk_tb(stop.__traceback__))[-1][0]
        if frame.f_globals.get("__name__", "").startswith(ENDS):
            raise
        code = frame.f_code
        raise RuntimeError(
            f"expected no StopIteration to leave {code.co_qualname} ({code.co_filename}, line {code.co_firstlineno}), "
            "got one, which Lightning takes for the end of the data: catch it there, or pass a default to next()"
        ) from error
