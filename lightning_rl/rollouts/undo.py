"""Undo: an error between two optimizer steps puts a run back to the last one, from which a checkpoint goes on."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning.pytorch import Trainer

from lightning_rl.corrections import Corrections
from lightning_rl.data import PromptDataModule, Ticket
from lightning_rl.edits import EditError, WeightEditError
from lightning_rl.rollouts.prefetch import Prefetcher


class Current(Protocol):
    """A rollout in progress."""

    @property
    def number(self) -> int:
        """Of the rollout."""
        ...

    def check_edits(self, since: str) -> None:
        """Raises an EditError if somebody wrote to it."""
        ...


class Run(Protocol):
    """What an error puts back: the part of a run's state that moves between two optimizer steps."""

    corrections: Corrections
    prefetcher: Prefetcher
    current: Any
    skipped: int
    nonfinite_in_a_row: int
    mark: "Mark | None"
    failure: "Failure | None"
    settled: BaseException | None
    unsettled: str | None

    def end_step(self, ticket: Ticket, *, last: bool) -> None:
        """Leaves everything as a checkpoint after the step of a ticket should find it."""
        ...

    def drop_tracer(self) -> None:
        """Ends what follows the parameters of a step that broke off."""
        ...


@dataclass(slots=True)
class Mark:
    """Where a run stood when something began that an error may break off: a ticket, or its optimizer step.

    Attributes:
        ticket: that was taken.
        cursor: of the prompt stream.
        ahead: the rollouts that were asked for.
        current: the rollout in progress.
        skipped: optimizer steps left out so far.
        nonfinite_in_a_row: non-finite gradients so far.
        states: of the corrections, by name.
        stepping: whether the optimizer is at work, so that weights may be neither old nor new.
        made: whether the optimizer step was made or left out.
    """

    ticket: Ticket
    cursor: int
    ahead: set[int]
    current: Current | None
    skipped: int
    nonfinite_in_a_row: int
    states: Mapping[str, Any] = field(default_factory=dict)
    stepping: bool = False
    made: bool = False

    @staticmethod
    def of(run: Run, ticket: Ticket, cursor: int) -> "Mark":
        """Where a run stands, but for its corrections."""
        return Mark(
            ticket=ticket,
            cursor=cursor,
            ahead=run.prefetcher.numbers(),
            current=run.current,
            skipped=run.skipped,
            nonfinite_in_a_row=run.nonfinite_in_a_row,
        )

    def keep_states(self, corrections: Corrections) -> None:
        """Keeps what the corrections know; one that raises when it is asked is undone like any other error."""
        states = {callback.name: callback.state_dict() for callback in corrections.callbacks}
        self.states = copy.deepcopy({name: state for name, state in states.items() if state})

    def undo(self, run: Run, stream: PromptDataModule, trainer: Trainer, steps_per_rollout: int) -> str | None:
        """Puts a run back to the mark, or, if the optimizer step was made, to where the next ticket would be taken.

        Returns:
            Why that cannot be; None if it was done.
        """
        if self.stepping:
            return "the error came in the middle of an optimizer step"
        if self.made:
            run.end_step(self.ticket, last=self.ticket.step == steps_per_rollout - 1)
            trainer.fit_loop.epoch_loop.batch_progress.increment_processed()
            return None
        stream.give_back(self.ticket, self.cursor)
        run.prefetcher.drop(*(run.prefetcher.numbers() - self.ahead))
        run.current, run.skipped, run.nonfinite_in_a_row = self.current, self.skipped, self.nonfinite_in_a_row
        self.restore_corrections(run)
        return None

    def restore_corrections(self, run: Run) -> None:
        """Gives the corrections back what they knew."""
        for callback in run.corrections.callbacks:
            if callback.name in self.states:
                callback.load_state_dict(copy.deepcopy(dict(self.states[callback.name])))


@dataclass(slots=True)
class Failure:
    """A rollout that an error came in, and how often in a row.

    Attributes:
        rollout: its number.
        count: how often.
    """

    rollout: int
    count: int

    @staticmethod
    def next(before: "Failure | None", rollout: int) -> "Failure":
        """One more."""
        again = before is not None and before.rollout == rollout
        return Failure(rollout, before.count + 1 if again and before is not None else 1)

    def note(self) -> str:
        """What to do about it, once it came back."""
        again = f"rollout {self.rollout} failed, seen {self.count} of {self.count} times: mend the cause and resume"
        if self.count == 1:
            return again
        return f"{again}, or go on without it by RLLightningModule(skip_rollouts=[{self.rollout}])"


def settle(
    run: Run, error: BaseException, stream: PromptDataModule, trainer: Trainer, steps_per_rollout: int
) -> str | None:
    """Undoes what began after the last optimizer step, once for each error, and notes the rollout that it came in.

    Returns:
        Why the run cannot be put back; None if it was.
    """
    if run.settled is not None and run.settled in (error, error.__cause__):
        return run.unsettled
    mark, run.mark, run.settled = run.mark, None, error
    run.drop_tracer()
    run.unsettled = None if mark is None else mark.undo(run, stream, trainer, steps_per_rollout)
    if run.unsettled is None and isinstance(error, WeightEditError):
        run.unsettled = str(error)
    if run.unsettled is None and run.current is not None:
        run.unsettled = _edits(run.current)
    number = mark.ticket.rollout if mark is not None else None if run.current is None else run.current.number
    if number is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        run.failure = Failure.next(run.failure, number)
        error.add_note(run.failure.note())
    return run.unsettled


def _edits(current: Current) -> str | None:
    """What somebody changed in the rollout that the next steps train on, which would make a checkpoint of it wrong."""
    try:
        current.check_edits("since it was finished")
    except EditError as edited:
        return str(edited)
    return None
