"""Rollback to the last optimizer step after an error, so that a checkpoint can resume from there."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning.pytorch import Trainer

from lightning_rl.corrections import Corrections
from lightning_rl.data import PromptDataModule, StepIndex
from lightning_rl.rollouts.prefetch import Prefetcher
from lightning_rl.utils.mutation_guard import EditError


class Current(Protocol):
    """A rollout in progress."""

    @property
    def number(self) -> int:
        """Number of the rollout."""
        ...

    def check_edits(self) -> None:
        """Raise an EditError if the rollout was modified."""
        ...


class Run(Protocol):
    """Part of a run's state that changes between two optimizer steps."""

    corrections: Corrections
    prefetcher: Prefetcher
    current: Any
    skipped: int
    nonfinite_in_a_row: int
    mark: "Mark | None"
    failure: "Failure | None"
    settled: BaseException | None
    unsettled: str | None

    def end_step(self, step_index: StepIndex, *, last: bool) -> None:
        """Complete the step of a step index, as a checkpoint expects."""
        ...


@dataclass(slots=True)
class Mark:
    """Snapshot of a run from before a step index or its optimizer step.

    Attributes:
        step_index: Current step index.
        cursor: Position in the prompt stream.
        ahead: Numbers of the rollouts submitted ahead.
        current: Rollout in progress.
        skipped: Number of skipped optimizer steps.
        nonfinite_in_a_row: Number of non-finite gradients in a row.
        states: States of the corrections, by name.
        stepping: True while the optimizer updates weights, so that some may be old and some new.
        made: True if the optimizer step was made or skipped.
    """

    step_index: StepIndex
    cursor: int
    ahead: set[int]
    current: Current | None
    skipped: int
    nonfinite_in_a_row: int
    states: Mapping[str, Any] = field(default_factory=dict)
    stepping: bool = False
    made: bool = False

    @staticmethod
    def of(run: Run, step_index: StepIndex, cursor: int) -> "Mark":
        """Take a snapshot without the corrections."""
        return Mark(
            step_index=step_index,
            cursor=cursor,
            ahead=run.prefetcher.numbers(),
            current=run.current,
            skipped=run.skipped,
            nonfinite_in_a_row=run.nonfinite_in_a_row,
        )

    def keep_states(self, corrections: Corrections) -> None:
        """Store the states of the corrections; an error in ``state_dict`` is rolled back like any other."""
        states = {callback.name: callback.state_dict() for callback in corrections.callbacks}
        self.states = copy.deepcopy({name: state for name, state in states.items() if state})

    def undo(self, run: Run, stream: PromptDataModule, trainer: Trainer, steps_per_rollout: int) -> str | None:
        """Roll a run back to the snapshot, or, if the optimizer step was made, complete the step.

        Returns:
            Reason why that is impossible; None on success.
        """
        if self.stepping:
            return "the error came in the middle of an optimizer step"
        if self.made:
            run.end_step(self.step_index, last=self.step_index.step == steps_per_rollout - 1)
            trainer.fit_loop.epoch_loop.batch_progress.increment_processed()
            return None
        stream.give_back(self.step_index, self.cursor)
        run.prefetcher.drop(*(run.prefetcher.numbers() - self.ahead))
        run.current, run.skipped, run.nonfinite_in_a_row = self.current, self.skipped, self.nonfinite_in_a_row
        self.restore_corrections(run)
        return None

    def restore_corrections(self, run: Run) -> None:
        """Load the stored states into the corrections."""
        for callback in run.corrections.callbacks:
            if callback.name in self.states:
                callback.load_state_dict(copy.deepcopy(dict(self.states[callback.name])))


@dataclass(slots=True)
class Failure:
    """A rollout in which an error was raised.

    Attributes:
        rollout: Number of the rollout.
        count: Number of errors in a row.
    """

    rollout: int
    count: int

    @staticmethod
    def next(before: "Failure | None", rollout: int) -> "Failure":
        """Return the failure of a rollout, counted up if ``before`` is of the same rollout."""
        again = before is not None and before.rollout == rollout
        return Failure(rollout, before.count + 1 if again and before is not None else 1)

    def note(self) -> str:
        """Return advice for a repeated error."""
        again = f"rollout {self.rollout} failed in {self.count} of {self.count} attempts: fix the cause and resume"
        if self.count == 1:
            return again
        return f"{again}, or skip it by RLLightningModule(skip_rollouts=[{self.rollout}])"


def settle(
    run: Run, error: BaseException, stream: PromptDataModule, trainer: Trainer, steps_per_rollout: int
) -> str | None:
    """Roll back to the last optimizer step, once for each error, and record the rollout that failed.

    Returns:
        Reason why the rollback is impossible; None on success.
    """
    if run.settled is not None and run.settled in (error, error.__cause__):
        return run.unsettled
    mark, run.mark, run.settled = run.mark, None, error
    run.unsettled = None if mark is None else mark.undo(run, stream, trainer, steps_per_rollout)
    if run.unsettled is None and run.current is not None:
        run.unsettled = _edits(run.current)
    number = mark.step_index.rollout if mark is not None else None if run.current is None else run.current.number
    if number is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        run.failure = Failure.next(run.failure, number)
        error.add_note(run.failure.note())
    return run.unsettled


def _edits(current: Current) -> str | None:
    """Return the message about in-place edits of the current rollout, or None."""
    try:
        current.check_edits()
    except EditError as edited:
        return str(edited)
    return None
