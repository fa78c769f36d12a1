"""The state of a run besides its weights: the rollout in progress, everything else, and what a checkpoint keeps."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from transformers import PreTrainedModel, TrainerState

from lightning_rl.checkpointing import new_run
from lightning_rl.compatibility import Needs
from lightning_rl.corrections import Corrections, Stat
from lightning_rl.data import Prompt, Ticket
from lightning_rl.distributed import Collectives
from lightning_rl.edits import EditError, Seal
from lightning_rl.generation import Sampling
from lightning_rl.metrics import MetricLog, PhaseTimes
from lightning_rl.policy import Plan, Scorer
from lightning_rl.policy.plan import divide_plan, plan_of_rows
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.idle import IdleRollouts
from lightning_rl.rollouts.prefetch import Prefetcher
from lightning_rl.rollouts.undo import Failure, Mark
from lightning_rl.update import ParameterTracer

MAX_NONFINITE_IN_A_ROW = 3
MaxOverRanks = Callable[[Sequence[int]], list[int]]
"""The element-wise maximum of a list over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentRollout:
    """A finished rollout from its first optimizer step to its last, with its plan and its seal.

    Args:
        number: of the rollout.
        rollout: with its signal.
        plan: used by every pass over it.
        seal: of its fields, when the rollout was finished.
    """

    number: int
    rollout: Rollout
    plan: Plan
    seal: Seal

    @staticmethod
    def of(number: int, rollout: Rollout, plan: Plan) -> "CurrentRollout":
        """Holds a rollout from now on."""
        return CurrentRollout(number=number, rollout=rollout, plan=plan, seal=Seal.of(rollout.tensors()))

    def check_edits(self, since: str, hooks: Callable[[], Sequence[str]] = tuple) -> None:
        """Refuses a rollout that anybody wrote to since it was finished, by whatever way.

        Args:
            since: when the last time was that it was whole, to end the sentence "was written to".
            hooks: names those who had the chance; asked only if there is an edit.

        Raises:
            EditError: naming the fields.
        """
        fields = self.rollout.tensors()
        if self.seal.holds(fields):
            return
        if edited := self.seal.changes(Seal.of(fields, self.seal)):
            who = f"one of {', '.join(names)}" if (names := hooks()) else "some callback"
            raise EditError(
                f"the held rollout was written to in place {since}: {', '.join(edited)}; {who} keeps a reference to it "
                "and edits it"
            )

    def divide(self, token_budget: int, *, packed: bool, max_over_ranks: MaxOverRanks) -> "CurrentRollout":
        """The same rows in smaller microbatches; every rank takes part."""
        device, rollout = self.rollout.response_ids.device, self.rollout.to("cpu")
        plan = divide_plan(
            rollout, self.plan.rows(), token_budget=token_budget, packed=packed, max_over_ranks=max_over_ranks
        )
        return replace(self, plan=plan.to(device))

    def state(self) -> dict[str, Any]:
        """Plain values and tensors that load under ``weights_only=True``."""
        return {"number": self.number, "rollout": self.rollout.to("cpu").state(), "rows": self.plan.rows()}

    @staticmethod
    def from_state(state: Mapping[str, Any], device: torch.device, *, packed: bool) -> "CurrentRollout":
        """The inverse of :meth:`state`, on a device."""
        rollout = Rollout.from_state(state["rollout"])
        plan = plan_of_rows(rollout, state["rows"], packed=packed)
        return CurrentRollout.of(state["number"], rollout.to(device), plan.to(device))


@dataclass(slots=True)
class RunState:
    """The one mutable place of a run. Lives outside of the module tree, so it is neither sharded nor moved.

    Attributes:
        corrections: those of the trainer's callbacks, from setup on.
        configuration: everything that makes the run what it is, in plain values, from setup on.
        needs: which optional fields somebody reads.
        reference: the frozen policy, if something reads it.
        replica: what the embedded engine decodes with, where a rank lacks parts of the policy or trains it meanwhile.
        sampling: that of the module, with the ids that end a response.
        engine_started: whether the engine can take weights.
        current: the rollout in progress.
        prefetcher: the rollouts that are generated ahead.
        metrics: what has not been logged yet.
        times: seconds by phase.
        rollout_stats: what was logged of the current rollout.
        failed_folder: where the samples go that rewards fail on.
        tracer: follows the parameters through the optimizer step that is being made.
        ticket: index of the last one that this fit has served.
        built_alone: whether the policy was built before there was a Trainer, so for no strategy yet.
        stepped: whether the policy has moved since it was built.
        skipped: optimizer steps that were left out.
        idle: how many rollouts in a row taught the policy nothing.
        nonfinite_in_a_row: how many of the last steps had a non-finite gradient.
        loaded: this rank's part of a checkpoint, until fit starts.
        name: of the run, by which its checkpoints are told from those of others; a resumed run keeps it.
        mark: where the run stood when the current ticket, or its optimizer step, began.
        late_error: what was raised after an optimizer step, until everything that belongs to the step is done.
        settled: the error that the run was put back after.
        unsettled: why it could not be.
        failure: the rollout that the last error came in.
        schedule_behind: whether the scheduler still has to make its step after the last one of the optimizer.
        budget: of tokens, since memory ran out, with what was asked for; None for what was asked for.
    """

    corrections: Corrections = field(default_factory=Corrections)
    configuration: dict[str, Any] = field(default_factory=dict)
    needs: Needs = field(default_factory=Needs)
    reference: Scorer | None = None
    replica: PreTrainedModel | None = None
    sampling: Sampling = field(default_factory=Sampling)
    engine_started: bool = False
    current: CurrentRollout | None = None
    prefetcher: Prefetcher = field(default_factory=Prefetcher)
    metrics: MetricLog = field(default_factory=MetricLog)
    times: PhaseTimes = field(default_factory=PhaseTimes)
    rollout_stats: dict[str, Stat] = field(default_factory=dict)
    failed_folder: Path | None = None
    tracer: ParameterTracer | None = None
    ticket: int | None = None
    built_alone: bool = False
    stepped: bool = False
    skipped: int = 0
    nonfinite_in_a_row: int = 0
    idle: IdleRollouts = field(default_factory=IdleRollouts)
    loaded: Mapping[str, Any] | None = None
    name: str = ""
    mark: Mark | None = None
    late_error: Exception | None = None
    settled: BaseException | None = None
    unsettled: str | None = None
    failure: Failure | None = None
    schedule_behind: bool = False
    budget: tuple[int, int] | None = None

    def set_mark(self, ticket: Ticket, cursor: int) -> None:
        """Notes where the run stands at a ticket, or at its optimizer step."""
        self.mark = Mark.of(self, ticket, cursor)
        self.mark.keep_states(self.corrections)

    def note_step(self) -> None:
        """Notes that the optimizer step of the current ticket was made or left out."""
        if self.mark is not None:
            self.mark.stepping, self.mark.made = False, True

    def end_step(self, ticket: Ticket, *, last: bool) -> None:
        """Leaves everything as a checkpoint after the step of a ticket should find it, in on_train_batch_end."""
        self.mark, self.ticket = None, ticket.index
        if last:
            self.current = None

    def drop_tracer(self) -> None:
        """Ends what follows the parameters of a step that broke off."""
        if self.tracer is not None:
            self.tracer.release()
            self.tracer = None

    def token_budget(self, asked: int) -> int:
        """Most tokens of a microbatch: what was asked for, unless memory ran out with it."""
        return self.budget[1] if self.budget is not None and self.budget[0] == asked else asked

    def halve(self, asked: int) -> int:
        """Half of the token budget from now on; returns it."""
        self.budget = asked, max(1, self.token_budget(asked) // 2)
        return self.budget[1]

    def accept(self, norm: Tensor, *, patient: bool = False) -> bool:
        """Whether a step with this gradient norm is made; counts those that are not.

        Args:
            norm: before clipping.
            patient: never raise, because a gradient scaler is looking for its scale.

        Raises:
            FloatingPointError: if the norm was not finite too often in a row.
        """
        if torch.isfinite(norm):
            self.nonfinite_in_a_row = 0
            self.stepped = True
            if self.tracer is not None:
                self.tracer.after_clipping()
            return True
        self.skipped += 1
        self.nonfinite_in_a_row += 1
        if not patient and self.nonfinite_in_a_row >= MAX_NONFINITE_IN_A_ROW:
            raise FloatingPointError(
                f"{MAX_NONFINITE_IN_A_ROW} optimizer steps in a row had a gradient norm of {float(norm)}: lower the "
                "learning rate, or look for a loss term, weight or reward that is not finite"
            )
        return False

    def count(self, number: int) -> None:
        """Notes how far the run is: number of the rollout, optimizer steps left out."""
        counters = Stat.numbers({"optim/skipped": self.skipped, "rollout": number})
        self.metrics.add("counter", {name: stat.maximum() for name, stat in counters.items()})

    def state(self) -> dict[str, Any]:
        """This rank's part of a checkpoint, in values that load under ``weights_only=True``."""
        return {
            "current": None if self.current is None else self.current.state(),
            "prefetched": self.prefetcher.state(),
            "metrics": self.metrics.state(),
            "skipped": self.skipped,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
            "idle": self.idle.state(),
            "failure": None if self.failure is None else (self.failure.rollout, self.failure.count),
            "schedule_behind": self.schedule_behind,
            "budget": self.budget,
        }

    def begin(
        self,
        device: torch.device,
        *,
        packed: bool,
        at: Callable[[Iterable[int]], list[Prompt]],
        max_staleness: int,
        collectives: Collectives,
    ) -> None:
        """Starts a fit: continues from what was loaded, or drops a rollout that an earlier fit left behind.

        Args:
            device: where the rollout in progress belongs.
            packed: whether microbatches are free of padding.
            at: the prompts at some places of the stream.
            max_staleness: how many rollouts may be generated ahead.
            collectives: what the ranks do together.

        Raises:
            ValueError: if the checkpoint has more of them.
        """
        loaded, self.loaded, self.current = self.loaded, None, None
        if loaded is None or not self.name:
            self.name = new_run()
        self.rollout_stats, self.tracer, self.ticket, self.idle = {}, None, None, IdleRollouts()
        self.mark = self.late_error = self.settled = self.unsettled = self.failure = self.budget = None
        self.schedule_behind = False
        self.prefetcher.close()
        self.metrics, self.skipped, self.nonfinite_in_a_row = MetricLog(device, collectives), 0, 0
        self.times = PhaseTimes()
        if self.reference is not None:
            self.reference.to(device)
        if loaded is None:
            return
        self.metrics.load(loaded["metrics"])
        self.skipped, self.nonfinite_in_a_row = loaded["skipped"], loaded["nonfinite_in_a_row"]
        self.idle = IdleRollouts.from_state(loaded["idle"])
        self.failure = None if loaded["failure"] is None else Failure(*loaded["failure"])
        self.schedule_behind = loaded.get("schedule_behind", False)
        self.budget = None if loaded["budget"] is None else tuple(loaded["budget"])
        if len(loaded["prefetched"]) > max_staleness:
            raise ValueError(
                f"expected a checkpoint with at most {max_staleness} rollouts in flight (max_staleness), got "
                f"{len(loaded['prefetched'])}: resume with max_staleness={len(loaded['prefetched'])}"
            )
        self.prefetcher.load(loaded["prefetched"], at)
        if loaded["current"] is not None:
            self.current = CurrentRollout.from_state(loaded["current"], device, packed=packed)

    def load(self, checkpoint: Mapping[str, Any], *, rank: int, world_size: int) -> None:
        """Takes this rank's part of a checkpoint.

        Raises:
            ValueError: if the checkpoint was written by another number of ranks or with another reference.
        """
        self.stepped = True
        ranks, reference = checkpoint["ranks"], checkpoint["reference_hash"]
        mine = None if self.reference is None else self.reference.fingerprint
        if len(ranks) != world_size:
            raise ValueError(
                f"expected a checkpoint of {world_size} ranks, got one of {len(ranks)}: resume with as many devices"
            )
        if mine is not None and reference is not None and reference != mine:
            raise ValueError(
                f"expected the reference of the checkpoint ({reference}), got another one ({mine}): pass the "
                "reference= and policy= that the run began with"
            )
        self.loaded, self.name = ranks[rank], checkpoint["run"]


def trainer_state(trainer: Trainer) -> TrainerState:
    """How far a fit is, in the form in which reward functions written for TRL ask for it."""
    batches, passed = trainer.num_training_batches, trainer.fit_loop.epoch_loop.batch_progress.current.completed
    share = passed / batches if 0 < batches < math.inf else 0.0
    return TrainerState(
        global_step=trainer.global_step, max_steps=trainer.max_steps, epoch=trainer.current_epoch + min(share, 1.0)
    )
