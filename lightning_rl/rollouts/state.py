"""State of a run besides its weights, and the part of it that a checkpoint stores."""

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
from lightning_rl.corrections import Corrections, Stat
from lightning_rl.data import Prompt, StepIndex
from lightning_rl.distributed import Collectives
from lightning_rl.generation import SamplingParams
from lightning_rl.metrics import MetricLog, PhaseTimes
from lightning_rl.policy import Plan, Scorer
from lightning_rl.policy.plan import divide_plan, plan_of_rows
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.prefetch import Prefetcher
from lightning_rl.rollouts.rollback import Failure, Mark
from lightning_rl.rollouts.zero_gradient import IdleRollouts
from lightning_rl.run_spec import Needs
from lightning_rl.update import MadeStep
from lightning_rl.utils.mutation_guard import EditError, Versions

MAX_NONFINITE_IN_A_ROW = 3
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

    def check_edits(self) -> None:
        """Check that the rollout has not been modified since it was finished.

        Raises:
            EditError: With the names of the modified fields.
        """
        if edited := self.versions.changes(self.rollout.tensors()):
            raise EditError(
                f"the held rollout was written to in place since it was finished: {', '.join(edited)}; some callback "
                "keeps a reference to it and edits it: SignalAudit names the callback"
            )

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


@dataclass(slots=True)
class RunState:
    """Mutable state of a run, kept outside of the module tree so that it is neither sharded nor moved.

    Attributes:
        corrections: Corrections among the trainer's callbacks, from setup on.
        configuration: Configuration of the run in plain values, from setup on.
        needs: Optional rollout fields that are read.
        reference: Frozen reference policy, if needed.
        replica: Copy of the policy that the embedded engine decodes with, where it cannot use the policy.
        sampling: Sampling parameters of the module, with the ids that end a response.
        engine_started: True once the engine can load weights.
        current: Rollout in progress.
        prefetcher: Rollouts that are generated ahead.
        metrics: Metrics that have not been logged yet.
        times: Seconds by phase.
        rollout_stats: Logged metrics of the current rollout.
        failed_folder: Folder for samples with failed rewards.
        tracer: Tracer of the parameters during an optimizer step.
        step_index: Last step index of this fit.
        built_alone: True if the policy was built before there was a Trainer, so without a strategy.
        stepped: True if the policy has changed since it was built.
        skipped: Number of skipped optimizer steps.
        idle: Counter of rollouts in a row without a gradient.
        nonfinite_in_a_row: Number of last steps in a row with a non-finite gradient.
        loaded: This rank's part of a checkpoint, until fit starts.
        name: Name of the run, which identifies its checkpoints; a resumed run keeps it.
        mark: Snapshot from before the current step index or its optimizer step.
        made: Optimizer step that is not measured yet.
        settled: Error after which the run was rolled back.
        unsettled: Reason why the rollback failed.
        failure: Rollout in which the last error was raised.
        schedule_behind: True if the scheduler has not stepped since the last optimizer step.
        budget: Requested and reduced token budget after memory ran out; None before.
    """

    corrections: Corrections = field(default_factory=Corrections)
    configuration: dict[str, Any] = field(default_factory=dict)
    needs: Needs = field(default_factory=Needs)
    reference: Scorer | None = None
    replica: PreTrainedModel | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    engine_started: bool = False
    current: CurrentRollout | None = None
    prefetcher: Prefetcher = field(default_factory=Prefetcher)
    metrics: MetricLog = field(default_factory=MetricLog)
    times: PhaseTimes = field(default_factory=PhaseTimes)
    rollout_stats: dict[str, Stat] = field(default_factory=dict)
    failed_folder: Path | None = None
    step_index: int | None = None
    built_alone: bool = False
    stepped: bool = False
    skipped: int = 0
    nonfinite_in_a_row: int = 0
    idle: IdleRollouts = field(default_factory=IdleRollouts)
    loaded: Mapping[str, Any] | None = None
    name: str = ""
    mark: Mark | None = None
    made: MadeStep | None = None
    settled: BaseException | None = None
    unsettled: str | None = None
    failure: Failure | None = None
    schedule_behind: bool = False
    budget: tuple[int, int] | None = None

    def set_mark(self, step_index: StepIndex, cursor: int) -> None:
        """Take a snapshot of the run at a step index or at its optimizer step."""
        self.mark = Mark.of(self, step_index, cursor)
        self.mark.keep_states(self.corrections)

    def note_step(self, step: MadeStep) -> None:
        """Record that the optimizer step of the current step index was made or skipped."""
        self.made = step
        if self.mark is not None:
            self.mark.stepping, self.mark.made = False, True

    def end_step(self, step_index: StepIndex, *, last: bool) -> None:
        """Complete the step of a step index, as a checkpoint in ``on_train_batch_end`` expects."""
        self.mark, self.step_index = None, step_index.index
        if last:
            self.current = None

    def max_tokens_per_microbatch(self, asked: int) -> int:
        """Return the maximum number of tokens per microbatch: ``asked``, or less after memory ran out with it."""
        return self.budget[1] if self.budget is not None and self.budget[0] == asked else asked

    def halve(self, asked: int) -> int:
        """Halve the token budget and return it."""
        self.budget = asked, max(1, self.max_tokens_per_microbatch(asked) // 2)
        return self.budget[1]

    def accept(self, norm: Tensor, *, patient: bool = False) -> bool:
        """Return True if a step with this gradient norm is to be made, and count the others.

        Args:
            norm: Gradient norm before clipping.
            patient: True to never raise, while a gradient scaler adjusts its scale.

        Raises:
            FloatingPointError: If the norm was not finite in too many steps in a row.
        """
        if torch.isfinite(norm):
            self.nonfinite_in_a_row = 0
            self.stepped = True
            return True
        self.skipped += 1
        self.nonfinite_in_a_row += 1
        if not patient and self.nonfinite_in_a_row >= MAX_NONFINITE_IN_A_ROW:
            raise FloatingPointError(
                f"expected a finite gradient norm, got {float(norm)} in {MAX_NONFINITE_IN_A_ROW} optimizer steps in a "
                "row: lower the learning rate, or look for a loss term, weight or reward that is not finite"
            )
        return False

    def count(self, number: int) -> None:
        """Log the number of the rollout and the number of skipped optimizer steps."""
        counters = Stat.numbers({"optim/skipped": self.skipped, "rollout": number})
        self.metrics.add("counter", {name: stat.maximum() for name, stat in counters.items()})

    def state(self) -> dict[str, Any]:
        """Return this rank's part of a checkpoint, in values that load under ``weights_only=True``."""
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
        """Start a fit from the loaded checkpoint, or drop the rollout of an earlier fit.

        Args:
            device: Device of the rollout in progress.
            packed: True if microbatches have no padding.
            at: Returns the prompts at indices of the stream.
            max_staleness: Maximum number of rollouts generated ahead.
            collectives: Collectives over the ranks.

        Raises:
            ValueError: If the checkpoint has more rollouts ahead.
        """
        loaded, self.loaded, self.current = self.loaded, None, None
        if loaded is None or not self.name:
            self.name = new_run()
        self.rollout_stats, self.step_index, self.idle = {}, None, IdleRollouts()
        self.mark = self.made = self.settled = self.unsettled = self.failure = self.budget = None
        self.schedule_behind = False
        self.prefetcher.close()
        self.metrics, self.skipped, self.nonfinite_in_a_row = MetricLog(device, collectives), 0, 0
        self.times = PhaseTimes(device)
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
        """Load this rank's part of a checkpoint.

        Raises:
            ValueError: If the checkpoint has another number of ranks or another reference.
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
    """Return the progress of a fit as a ``TrainerState``, for reward functions written for TRL."""
    batches, passed = trainer.num_training_batches, trainer.fit_loop.epoch_loop.batch_progress.current.completed
    share = passed / batches if 0 < batches < math.inf else 0.0
    return TrainerState(
        global_step=trainer.global_step, max_steps=trainer.max_steps, epoch=trainer.current_epoch + min(share, 1.0)
    )
