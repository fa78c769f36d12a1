"""Progress: what a checkpoint stores of a run besides weights, committed after every optimizer step."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_rl.corrections import Corrections
from lightning_rl.data import PromptDataModule, StepIndex
from lightning_rl.policy import ModelOptions, Plan
from lightning_rl.policy.memory import MAX_TOKENS
from lightning_rl.policy.plan import divide_plan, plan_of_rows
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.ahead import Ahead, Pending, pending_from_state, state_of_pending
from lightning_rl.update import StepGradient
from lightning_rl.utils.mutation_guard import EditError, Versions

MAX_NONFINITE_IN_A_ROW = 3
STORED = "skipped", "nonfinite_in_a_row", "failure", "budget", "discarded", "origin"  # as they are
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

    def divide(
        self, max_tokens_per_microbatch: int, *, packed: bool, by_sequence: bool, max_over_ranks: MaxOverRanks
    ) -> "CurrentRollout":
        """Split the rows into smaller microbatches; every rank has to call this."""
        device, rollout = self.rollout.response_ids.device, self.rollout.to("cpu")
        plan = divide_plan(
            rollout,
            self.plan.rows(),
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            packed=packed,
            by_sequence=by_sequence,
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


@dataclass(slots=True, kw_only=True)
class Progress:
    """State of a fit between two optimizer steps, in which a checkpoint is saved and a resumed run begins.

    Its position in the data is that of the last commit of the data module.

    Args:
        name: Name of the run, which identifies its checkpoints; a resumed run keeps it.
        corrections: Corrections among the callbacks.
        ahead: Rollouts that are generated ahead.
        options: Options of the models.
        max_over_ranks: Element-wise maximum over the ranks.
        current: Rollout in progress, until the observers of its last optimizer step have run; None between two.
        prefetched: Rollouts submitted ahead, by number.
        skipped: Number of skipped optimizer steps.
        nonfinite_in_a_row: Number of last steps in a row with a non-finite gradient.
        states: States of the corrections by name, from before the optimizer step that has begun; None between two
            steps, when the callbacks hold them.
        budget: Requested token budget (None for the default), and the one in use, which is smaller after memory ran
            out; None if the requested one is in use.
        failure: Number of the rollout in which the last error was raised, and the number of errors in a row.
        discarded: Number of a rollout that was dropped within its optimizer steps.
        origin: Index of the optimizer step that loggers count as 0; None before the first step of a fit.
        stepping: True while the optimizer updates weights, so that some may be old and some new.

    Attributes:
        data: Data module of the fit; unset before the first.
    """

    name: str = ""
    corrections: Corrections = field(default_factory=Corrections)
    ahead: Ahead = field(default_factory=Ahead)
    options: ModelOptions = ModelOptions()  # noqa: RUF009  frozen
    max_over_ranks: MaxOverRanks = list
    data: PromptDataModule = field(init=False, repr=False)
    current: CurrentRollout | None = None
    prefetched: Mapping[int, Pending] = field(default_factory=dict)
    skipped: int = 0
    nonfinite_in_a_row: int = 0
    states: Mapping[str, Mapping[str, Any]] | None = None
    budget: tuple[int | None, int] | None = None
    failure: tuple[int, int] | None = None
    discarded: int | None = None
    origin: int | None = None
    stepping: bool = False

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

    def skip_rollout(self, step_index: StepIndex) -> None:
        """Drop the rollout of a step index, but consume its prompts, so that the other rollouts keep theirs."""
        number = step_index.rollout
        if step_index.step == 0:
            rank_zero_info(f"rollout {number} is skipped (skip_rollouts)")
            if self.current is None and number not in self.ahead:
                self.data.take(self.data.prompts_per_rollout)
            self.ahead.drop(number)

    def begin_rollout(self, current: CurrentRollout, index: int) -> None:
        """Commit a finished rollout.

        Args:
            current: Finished rollout.
            index: Index of its first optimizer step.
        """
        self.ahead.drop(current.number)
        self.current, self.discarded, self.states = current, None, self.corrections.states()
        self.commit(index)

    def begin_step(self) -> None:
        """Keep the states of the corrections from before the hooks of an optimizer step."""
        self.stepping, self.states = False, self.corrections.states()

    def end_step(self, index: int, *, made: bool | None, keeps_rollout: bool = True) -> None:
        """Commit an optimizer step.

        Args:
            index: Index of the step.
            made: False if it is skipped for a non-finite gradient, None if for no tokens.
            keeps_rollout: False for a step on a skipped rollout, which is dropped.
        """
        if made is not None:
            self.nonfinite_in_a_row = 0 if made else self.nonfinite_in_a_row + 1
        self.skipped += not made
        self.current, self.states = self.current if keeps_rollout else None, None
        self.commit(index + 1)

    def commit(self, index: int) -> None:
        """Set the state that checkpoints store until the next commit, with the index of the next optimizer step."""
        self.stepping = False
        self.data.commit(index)
        self.prefetched = self.ahead.pending()

    @property
    def saved_rollout(self) -> CurrentRollout | None:
        """Rollout that a checkpoint stores: None if its last optimizer step is committed."""
        return None if self.current is None or self.current.number != self.data.rollout else self.current

    def write_corrections(self, states: dict[str, Any]) -> None:
        """Replace the states of the corrections in a checkpoint, by state key, by the committed ones."""
        for callback in self.corrections.callbacks:
            if self.states is not None and callback.name in self.states:
                states[callback.state_key] = self.states[callback.name]

    @property
    def save_problem(self) -> str | None:
        """Reason why the last commit does not fit the weights, or cannot be saved; None if it can."""
        if self.stepping:
            return "the error came in the middle of an optimizer step"
        return None if self.saved_rollout is None else self.saved_rollout.edits()

    @property
    def made_step(self) -> bool:
        """False within an optimizer step, until it is made or skipped."""
        return self.data.position.index == self.data.committed.index

    def axis(self, index: int) -> int:
        """Return the step of the loggers of an optimizer step by its index; a new Trainer counts from 0."""
        return index - (self.origin or 0)

    def note_error(self, error: BaseException) -> None:
        """Restore the corrections, and record the rollout in which an error was raised; its span ends."""
        self.ahead.spans.end(error=error)
        if self.states is not None:
            self.corrections.restore(self.states)
        in_rollout = self.saved_rollout is not None or not self.made_step
        if in_rollout and not isinstance(error, KeyboardInterrupt | SystemExit):
            number, before = self.data.rollout, self.failure
            count = before[1] + 1 if before is not None and before[0] == number else 1
            self.failure = number, count
            cure = "" if count == 1 else f", or skip it by FaultTolerance(skip_rollouts=[{number}])"
            error.add_note(f"rollout {number} failed in {count} of {count} attempts: fix the cause and resume{cure}")

    @property
    def max_tokens_per_microbatch(self) -> int:
        """Maximum number of tokens per microbatch: the option or its default, or less after memory ran out."""
        asked, budget = self.options.max_tokens_per_microbatch, self.budget
        return budget[1] if budget is not None and budget[0] == asked else asked or MAX_TOKENS

    def halve_microbatches(self, step_index: StepIndex, states: Mapping[str, Any], *, by_sequence: bool) -> None:
        """Halve the token budget of the current rollout after memory ran out; every rank has to call this.

        Args:
            step_index: Step in which memory ran out.
            states: States of the corrections before the step; they are restored.
            by_sequence: True if the sequences of a long row may lie in different microbatches.
        """
        torch.cuda.empty_cache()
        self.corrections.restore(states)
        budget = max(1, self.max_tokens_per_microbatch // 2)
        current = cast(CurrentRollout, self.current)
        self.current = current.divide(
            budget, packed=self.options.packing, by_sequence=by_sequence, max_over_ranks=self.max_over_ranks
        )
        self.budget = (self.options.max_tokens_per_microbatch, budget)
        rank_zero_warn(
            f"out of memory in step {step_index.step} of rollout {step_index.rollout}: the step is repeated with "
            f"max_tokens_per_microbatch={budget}; pass this value to ModelOptions"
        )

    def memory_note(self) -> str:
        """Return advice for an optimizer step that does not fit into memory."""
        mode, tokens = self.options.activation_checkpointing, self.max_tokens_per_microbatch
        cure = "" if mode == "full" else 'activation_checkpointing="full" or '
        return (
            f"expected an optimizer step that fits into memory, got max_tokens_per_microbatch={tokens} and "
            f"activation_checkpointing={mode!r}: pass {cure}max_tokens_per_microbatch={max(1, tokens // 2)} to "
            "ModelOptions"
        )

    def accept(self, step: StepGradient, norm: Tensor, *, patient: bool = False) -> bool:
        """Return True if a step with this gradient norm is to be made.

        Args:
            step: Optimizer step, in which the result is stored.
            norm: Gradient norm before clipping.
            patient: True to never raise, while a gradient scaler adjusts its scale.

        Raises:
            FloatingPointError: If the norm was not finite in too many steps in a row.
        """
        step.made = bool(torch.isfinite(norm))
        if not step.made and not patient and self.nonfinite_in_a_row + 1 >= MAX_NONFINITE_IN_A_ROW:
            raise FloatingPointError(
                f"expected a finite gradient norm, got {float(norm)} in {MAX_NONFINITE_IN_A_ROW} optimizer steps in a "
                "row: lower the learning rate, or look for a loss term, weight or reward that is not finite"
            )
        return step.made

    def discard_samples(self, changed: Collection[str], *, keep_prompts: bool) -> None:
        """Drop the samples of a checkpoint, which were made with other options, and perhaps the prompts ahead.

        Args:
            changed: Names of these options.
            keep_prompts: True if the prompts of the rollouts submitted ahead stay valid.
        """
        if self.current is not None:
            rank_zero_info(
                f"rollout {self.current.number} was made with other options ({', '.join(sorted(changed))}): its "
                "remaining optimizer steps are skipped"
            )
            self.discarded = self.current.number
        ahead = self.prefetched.items() if keep_prompts else ()
        self.current, self.prefetched = None, {number: replace(one, samples=None) for number, one in ahead}

    def state(self) -> dict[str, Any]:
        """Return values that load under ``weights_only=True``.

        Lightning stores position and corrections, in the states of data module and callbacks.
        """
        return {
            "current": None if self.saved_rollout is None else self.saved_rollout.state(),
            "prefetched": state_of_pending(self.prefetched),
            **{name: getattr(self, name) for name in STORED},
        }

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Restore the progress from :meth:`state`.

        Args:
            state: State of the progress.
            device: Device of the rollout in progress.
        """
        current, packed = state["current"], self.options.packing
        self.current = None if current is None else CurrentRollout.from_state(current, device, packed=packed)
        self.prefetched = pending_from_state(state["prefetched"], self.data.at, state["version"])
        for name in STORED:  # checkpoints of earlier versions lack the last two
            setattr(self, name, state.get(name, 0 if name == "origin" else None))
