"""Progress: what a checkpoint stores of a run besides weights, committed after every optimizer step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_rl.data import Prompt, StepIndex
from lightning_rl.policy import Plan
from lightning_rl.policy.plan import divide_plan, plan_of_rows
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.ahead import Pending, pending_from_state, state_of_pending
from lightning_rl.utils.mutation_guard import EditError, Versions

MaxOverRanks = Callable[[Sequence[int]], list[int]]
"""Element-wise maximum of a list over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentRollout:
    """A finished rollout from its first optimizer step to its last.

    Args:
        number: Number of the rollout.
        rollout: Rollout with advantages.
        plan: Plan of every pass over it.
        versions: Versions of its fields when it was finished.
    """

    number: int
    rollout: Rollout
    plan: Plan
    versions: Versions

    @staticmethod
    def of(number: int, rollout: Rollout, plan: Plan) -> "CurrentRollout":
        """Begin the optimizer steps on a rollout."""
        return CurrentRollout(number=number, rollout=rollout, plan=plan, versions=Versions(rollout.tensors()))

    def edits(self) -> str | None:
        """Return a message with the fields that have been modified since the rollout was finished, or None."""
        if not (edited := self.versions.changes(self.rollout.tensors())):
            return None
        return (
            f"the held rollout was written to in place since it was finished: {', '.join(edited)}; some callback "
            "keeps a reference to it and edits it: SignalAudit names the callback"
        )

    def check_edits(self) -> None:
        """Raise EditError with the names of the fields that have been modified since the rollout was finished."""
        if message := self.edits():
            raise EditError(message)

    def divide(self, max_tokens_per_microbatch: int, *, packed: bool, max_over_ranks: MaxOverRanks) -> "CurrentRollout":
        """Split the rows into smaller microbatches; every rank has to call this."""
        device, rollout = self.rollout.response_ids.device, self.rollout.to("cpu")
        plan = divide_plan(
            rollout,
            self.plan.rows(),
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            packed=packed,
            max_over_ranks=max_over_ranks,
        )
        return replace(self, plan=plan.to(device))

    def state(self) -> dict[str, Any]:
        """Return plain values and tensors that load under ``weights_only=True``."""
        return {"number": self.number, "rollout": self.rollout.to("cpu").state(), "rows": self.plan.rows()}

    @staticmethod
    def from_state(state: Mapping[str, Any], device: torch.device, *, packed: bool) -> "CurrentRollout":
        """Restore the rollout from :meth:`state` on a device."""
        rollout = Rollout.from_state(state["rollout"])
        plan = plan_of_rows(rollout, state["rows"], packed=packed)
        return CurrentRollout.of(state["number"], rollout.to(device), plan.to(device))


@dataclass(frozen=True, slots=True)
class RunFailure:
    """A rollout in which an error was raised.

    Attributes:
        rollout: Number of the rollout.
        count: Number of errors in a row.
    """

    rollout: int
    count: int

    def note(self) -> str:
        """Return advice for a repeated error."""
        again = f"rollout {self.rollout} failed in {self.count} of {self.count} attempts: fix the cause and resume"
        if self.count == 1:
            return again
        return f"{again}, or skip it by FaultTolerance(skip_rollouts=[{self.rollout}])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State of a run between two optimizer steps, in which a checkpoint is saved and a resumed run begins.

    Its position in the data is that of the last commit of the data module.

    Args:
        current: Rollout in progress, until the observers of its last optimizer step have run; None between two.
        prefetched: Rollouts submitted ahead, by number.
        skipped: Number of skipped optimizer steps.
        nonfinite_in_a_row: Number of last steps in a row with a non-finite gradient.
        corrections: States of the corrections by name, from before the optimizer step that has begun; None between
            two steps, when the callbacks hold them.
        budget: Requested token budget (None for the default), and the one in use, which is smaller after memory ran
            out; None if the requested one is in use.
        failure: Rollout in which the last error was raised.
        discarded: Number of a rollout that was dropped within its optimizer steps.
        origin: Index of the optimizer step that loggers count as 0; None before the first step of a fit.
    """

    current: CurrentRollout | None = None
    prefetched: Mapping[int, Pending] = field(default_factory=dict)
    skipped: int = 0
    nonfinite_in_a_row: int = 0
    corrections: Mapping[str, Mapping[str, Any]] | None = None
    budget: tuple[int | None, int] | None = None
    failure: RunFailure | None = None
    discarded: int | None = None
    origin: int | None = None

    def lacks_rollout(self, step_index: StepIndex) -> bool:
        """Return True if the rollout of a step index has to be made.

        Raises:
            RuntimeError: If the step index is not the first one of that rollout.
        """
        if self.current is not None and self.current.number == step_index.rollout:
            return False
        if step_index.step != 0:
            raise RuntimeError(
                f"expected step 0 of rollout {step_index.rollout} first, got step {step_index.step}: resume from a "
                "checkpoint or start a new fit"
            )
        return True

    def count(self, *, made: bool | None) -> "Progress":
        """Count an optimizer step that is made, skipped for a non-finite gradient (False), or for no tokens (None)."""
        in_a_row = self.nonfinite_in_a_row if made is None else 0 if made else self.nonfinite_in_a_row + 1
        return replace(self, skipped=self.skipped + (not made), nonfinite_in_a_row=in_a_row)

    def without_samples(self, *, keep_prompts: bool) -> "Progress":
        """Return the progress without its rollouts; those submitted ahead may keep their prompts."""
        ahead = self.prefetched.items() if keep_prompts else ()
        prefetched = {number: replace(pending, samples=None) for number, pending in ahead}
        discarded = self.discarded if self.current is None else self.current.number
        return replace(self, current=None, prefetched=prefetched, discarded=discarded)

    def state(self) -> dict[str, Any]:
        """Return values that load under ``weights_only=True``.

        Lightning stores position and corrections, in the states of data module and callbacks.
        """
        return {
            "current": None if self.current is None else self.current.state(),
            "prefetched": state_of_pending(self.prefetched),
            "skipped": self.skipped,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
            "failure": None if self.failure is None else (self.failure.rollout, self.failure.count),
            "budget": self.budget,
            "discarded": self.discarded,
            "origin": self.origin,
        }

    @staticmethod
    def from_state(
        state: Mapping[str, Any], device: torch.device, *, packed: bool, at: Callable[[Iterable[int]], list[Prompt]]
    ) -> "Progress":
        """Restore the progress from :meth:`state`.

        Args:
            state: State of the progress.
            device: Device of the rollout in progress.
            packed: True if microbatches have no padding.
            at: Returns the prompts at indices of the stream.
        """
        current, failure, budget = state["current"], state["failure"], state["budget"]
        return Progress(
            current=None if current is None else CurrentRollout.from_state(current, device, packed=packed),
            prefetched=pending_from_state(state["prefetched"], at, state["version"]),
            skipped=state["skipped"],
            nonfinite_in_a_row=state["nonfinite_in_a_row"],
            budget=None if budget is None else tuple(budget),
            failure=None if failure is None else RunFailure(*failure),
            discarded=state.get("discarded"),
            origin=state.get("origin", 0),
        )
