"""Loops: Lightning's loops end where the data do, and not at a StopIteration that somebody's code lets out.

Whatever is called in a run is called by one of Lightning's loops: hooks of the module and of callbacks, rewards,
losses, engines, optimizers, schedulers, what is saved. To a loop a StopIteration is the end of its data, whoever raised
it, and the fit counts as finished, or the step as made. Lightning raises its own in the loops and in what combines
loaders; any other becomes an error on its way.
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
"""Modules of Lightning that say that the data, or an epoch, are at an end."""

GENERATOR = "generator raised StopIteration"
"""What Python says of one that came through a generator; it has it for a cause."""


class WholeFitLoop(_FitLoop):
    """What :func:`protect_loops` adds to the loop over epochs."""

    @override
    def run(self) -> None:
        """Trains, and says so where a checkpoint leaves nothing to train: Lightning ends such a fit without a word."""
        if self.restarting and self.done:
            rank_zero_warn(
                f"nothing is left to train: the checkpoint stands at step {self.trainer.global_step} with "
                f"max_steps={self.max_steps}, and {self.epoch_progress.current.completed} of "
                f"max_epochs={self.max_epochs} count as over; raise what is reached"
            )
        super().run()

    @override
    def on_advance_start(self) -> None:
        epochs: Any = self.epoch_progress
        try:
            refuse_stops(super().on_advance_start)
        except BaseException:
            for count in (epochs.current, epochs.total):  # one that did not begin would count as one without batches
                count.ready = count.started
            raise

    @override
    def advance(self) -> None:
        refuse_stops(super().advance)

    @override
    def on_advance_end(self) -> None:
        refuse_stops(super().on_advance_end)


class WholeEpochLoop(_TrainingEpochLoop):
    """What :func:`protect_loops` adds to the loop over optimizer steps."""

    @override
    def advance(self, data_fetcher: Any) -> None:
        refuse_stops(super().advance, data_fetcher)

    @override
    def on_advance_end(self, data_fetcher: Any) -> None:
        refuse_stops(super().on_advance_end, data_fetcher)


class WholeStepLoop(_ManualOptimization):
    """What :func:`protect_loops` adds to the loop of one optimizer step."""

    @override
    def advance(self, kwargs: Any) -> None:
        refuse_stops(super().advance, kwargs)


class WholeEvaluationLoop(_EvaluationLoop):
    """What :func:`protect_loops` adds to the loop of a validation or test."""

    @override
    def _evaluation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Iterator[Any] | None
    ) -> None:
        refuse_stops(super()._evaluation_step, batch, batch_idx, dataloader_idx, dataloader_iter)


class WholePredictionLoop(_PredictionLoop):
    """What :func:`protect_loops` adds to the loop of a prediction."""

    @override
    def _predict_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Iterator[Any] | None
    ) -> None:
        refuse_stops(super()._predict_step, batch, batch_idx, dataloader_idx, dataloader_iter)


def protect_loops(trainer: Trainer) -> None:
    """Lets the loops of a Trainer raise what they would take for the end of the data.

    Its loops get classes of their own, as its strategy does; the others of this process stay as they are.
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
    """Calls a function, and raises instead of a StopIteration, unless it comes from Lightning itself.

    No context manager: a generator that raises an error from a StopIteration has it taken for its own.

    Raises:
        RuntimeError: naming the function that let it out; the StopIteration is its cause.
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
            "got one, which Lightning would take for the end of the data: catch it there, or give next() a default"
        ) from error
