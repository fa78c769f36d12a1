"""State of a run besides its weights, and the part of it that a checkpoint stores."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from transformers import TrainerState

from lightning_rl.algorithm import Needs
from lightning_rl.checkpointing import ConfiguredOptimizer, OptimizerChange, new_run
from lightning_rl.checkpointing.optimizer_options import option_changes, rate_changes
from lightning_rl.configuration import Change, check_resume, refuse_differences, warn_of_versions
from lightning_rl.corrections import Corrections, Stat
from lightning_rl.data import PromptDataModule, StepIndex
from lightning_rl.distributed import Collectives, Parallel
from lightning_rl.environments.run_environments import Environments
from lightning_rl.generation import SamplingParams
from lightning_rl.metrics import MetricLog, PhaseTimes
from lightning_rl.policy import FrozenModel, ModelOptions
from lightning_rl.policy.memory import MAX_TOKENS
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.ahead import Ahead
from lightning_rl.rollouts.lost_updates import LostUpdates
from lightning_rl.rollouts.progress import CurrentRollout, MaxOverRanks, Progress, RunFailure
from lightning_rl.update import StepGradient

MAX_NONFINITE_IN_A_ROW = 3
OF_UPDATES = {"optimizer", "lr_scheduler", "max_grad_norm", "max_staleness"}  # rollouts stay valid if these change


@dataclass(slots=True)
class RunState:
    """Mutable state of a run, kept outside of the module tree so that it is neither sharded nor moved.

    Attributes:
        corrections: Corrections among the trainer's callbacks, from setup on.
        configuration: Configuration of the run in plain values, from setup on.
        needs: Optional rollout fields that are read.
        sampling: Sampling parameters of the module, with the ids that end a response.
        environments: Environments of the samples; None for single-turn completions.
        engine_started: True once the engine can load weights.
        data: Data module of the fit; unset before the first.
        options: Options of the models of the fit.
        max_over_ranks: Element-wise maximum over the ranks of the fit.
        progress: State after the last optimizer step.
        ahead: Rollouts that are generated ahead.
        metrics: Metrics that have not been logged yet.
        times: Seconds by phase.
        rollout_stats: Logged metrics of the current rollout.
        rollout_figures: Their values over all ranks, with those of rewards and the numbers of rows and tokens.
        constant_calls: Calls of reward functions that all returned one constant in the last rollout, as text.
        failed_folder: Folder for samples with failed rewards.
        stepping: True while the optimizer updates weights, so that some may be old and some new.
        loaded: This rank's part of a checkpoint, until fit starts.
        name: Name of the run, which identifies its checkpoints; a resumed run keeps it.
        unlogged_step: Optimizer step whose metrics are not logged yet.
        optimizer: Optimizer as configured, in a fit.
        changes: Allowed differences between the configuration of the loaded checkpoint and that of the run.
        lost_updates: Measurement of steps that are lost in the rounding of the weights.
    """

    corrections: Corrections = field(default_factory=Corrections)
    configuration: dict[str, Any] = field(default_factory=dict)
    needs: Needs = field(default_factory=Needs)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    environments: Environments | None = None
    engine_started: bool = False
    data: PromptDataModule = field(init=False, repr=False)
    options: ModelOptions = ModelOptions()  # noqa: RUF009  frozen
    max_over_ranks: MaxOverRanks = list
    progress: Progress = field(default_factory=Progress)
    ahead: Ahead = field(default_factory=Ahead)
    metrics: MetricLog = field(default_factory=MetricLog)
    times: PhaseTimes = field(default_factory=PhaseTimes)
    rollout_stats: dict[str, Stat] = field(default_factory=dict)
    rollout_figures: Mapping[str, float] = field(default_factory=dict)
    constant_calls: str = ""
    failed_folder: Path | None = None
    stepping: bool = False
    loaded: Mapping[str, Any] | None = None
    name: str = ""
    unlogged_step: StepGradient | None = None
    optimizer: ConfiguredOptimizer | None = None
    changes: Sequence[Change] = ()
    lost_updates: LostUpdates = field(default_factory=LostUpdates)

    def skip_rollout(self, step_index: StepIndex) -> None:
        """Drop the rollout of a step index, but consume its prompts, so that the other rollouts keep theirs."""
        number = step_index.rollout
        if step_index.step == 0:
            rank_zero_info(f"rollout {number} is skipped (skip_rollouts)")
            if self.progress.current is None and number not in self.ahead:
                self.data.take(self.data.prompts_per_rollout)
            self.ahead.drop(number)

    def begin_rollout(
        self, current: CurrentRollout, index: int, stats: Mapping[str, Stat], logged: Mapping[str, Stat]
    ) -> None:
        """Commit a finished rollout with its metrics; every rank has to call this.

        Args:
            current: Finished rollout.
            index: Index of its first optimizer step.
            stats: Metrics of the rollout, without times.
            logged: Metrics that reward functions and environments logged.
        """
        self.rollout_stats = {**stats, **self.times.take(), **self.times.idle()}
        self.rollout_figures = self.metrics.values_of({**self.rollout_stats, **logged, **row_counts(current.rollout)})
        self.metrics.add("rollout", self.rollout_stats)
        self.metrics.add("noted", logged)
        self.ahead.drop(current.number)
        self.commit(
            index, replace(self.progress, current=current, discarded=None, corrections=self.corrections.states())
        )

    def begin_step(self) -> None:
        """Keep the states of the corrections from before the hooks of an optimizer step."""
        self.stepping = False
        self.progress = replace(self.progress, corrections=self.corrections.states())

    def end_step(self, step_index: StepIndex, step: StepGradient | None) -> None:
        """Commit an optimizer step; None for one on a skipped rollout, which is dropped."""
        self.unlogged_step = step
        progress = self.progress.count(made=None if step is None else step.made)
        current = None if step is None else progress.current
        self.commit(step_index.index + 1, replace(progress, current=current, corrections=None))

    def commit(self, index: int, progress: Progress) -> None:
        """Set the state that checkpoints store until the next commit.

        Args:
            index: Index of the next optimizer step.
            progress: Progress but for the rollouts ahead.
        """
        self.stepping = False
        self.data.commit(index)
        self.progress = replace(progress, prefetched=self.ahead.pending())

    @property
    def saved_progress(self) -> Progress:
        """Progress that a checkpoint stores: without a rollout whose last optimizer step is committed."""
        current = self.progress.current
        used_up = current is not None and current.number != self.data.rollout
        return replace(self.progress, current=None) if used_up else self.progress

    def write_corrections(self, states: dict[str, Any]) -> None:
        """Replace the states of the corrections in a checkpoint, by state key, by the committed ones."""
        for callback in self.corrections.callbacks:
            if self.progress.corrections is not None and callback.name in self.progress.corrections:
                states[callback.state_key] = self.progress.corrections[callback.name]

    @property
    def save_problem(self) -> str | None:
        """Reason why the last commit does not fit the weights, or cannot be saved; None if it can."""
        if self.stepping:
            return "the error came in the middle of an optimizer step"
        current = self.saved_progress.current
        return None if current is None else current.edits()

    @property
    def made_step(self) -> bool:
        """False within an optimizer step, until it is made or skipped."""
        return self.data.position.index == self.data.committed.index

    def axis(self, index: int) -> int:
        """Return the step of the loggers of an optimizer step by its index; a new Trainer counts from 0."""
        return index - (self.progress.origin or 0)

    def note_error(self, error: BaseException) -> None:
        """Restore the corrections, and record the rollout in which an error was raised."""
        if self.progress.corrections is not None:
            self.corrections.restore(self.progress.corrections)
        in_rollout = self.saved_progress.current is not None or not self.made_step
        if in_rollout and not isinstance(error, KeyboardInterrupt | SystemExit):
            number, before = self.data.rollout, self.progress.failure
            count = before.count + 1 if before is not None and before.rollout == number else 1
            failure = RunFailure(number, count)
            self.progress = replace(self.progress, failure=failure)
            error.add_note(failure.note())

    @property
    def max_tokens_per_microbatch(self) -> int:
        """Maximum number of tokens per microbatch: the option or its default, or less after memory ran out."""
        asked, budget = self.options.max_tokens_per_microbatch, self.progress.budget
        return budget[1] if budget is not None and budget[0] == asked else asked or MAX_TOKENS

    def use_default_budget(self, compute: Callable[[], tuple[int, str]]) -> None:
        """Set the token budget of a fit without ``max_tokens_per_microbatch``; every rank has to call this.

        Args:
            compute: Function that returns the budget of this rank, and the text of its derivation.
        """
        if self.progress.budget is None:
            tokens, derivation = compute()
            tokens = -self.max_over_ranks([-tokens])[0]
        else:
            tokens, derivation = self.progress.budget[1], "of the checkpoint"
        self.progress = replace(self.progress, budget=(None, tokens))
        rank_zero_info(f"max_tokens_per_microbatch={tokens} ({derivation})")

    def halve_microbatches(self, step_index: StepIndex, states: Mapping[str, Any]) -> None:
        """Halve the token budget of the current rollout after memory ran out; every rank has to call this.

        Args:
            step_index: Step in which memory ran out.
            states: States of the corrections before the step; they are restored.
        """
        torch.cuda.empty_cache()
        self.corrections.restore(states)
        budget = max(1, self.max_tokens_per_microbatch // 2)
        current = cast(CurrentRollout, self.progress.current)
        current = current.divide(budget, packed=self.options.packing, max_over_ranks=self.max_over_ranks)
        asked = self.options.max_tokens_per_microbatch
        self.progress = replace(self.progress, current=current, budget=(asked, budget))
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
        if not step.made and not patient and self.progress.nonfinite_in_a_row + 1 >= MAX_NONFINITE_IN_A_ROW:
            raise FloatingPointError(
                f"expected a finite gradient norm, got {float(norm)} in {MAX_NONFINITE_IN_A_ROW} optimizer steps in a "
                "row: lower the learning rate, or look for a loss term, weight or reward that is not finite"
            )
        return step.made

    def count(self, number: int) -> None:
        """Log the number of the rollout and the number of skipped optimizer steps."""
        counters = Stat.numbers({"optim/skipped": self.progress.skipped, "rollout": number})
        self.metrics.add("counter", {name: stat.maximum() for name, stat in counters.items()})

    def begin(self, parallel: Parallel, data: PromptDataModule, options: ModelOptions) -> None:
        """Start a fit from the loaded checkpoint, or drop the rollout of an earlier fit.

        Args:
            parallel: Strategy of the run.
            data: Data module of the fit.
            options: Options of the models of the fit.

        Raises:
            ValueError: If the checkpoint has more rollouts ahead.
        """
        device, collectives = parallel.strategy.root_device, parallel.collectives
        loaded, self.loaded = self.loaded, None
        if loaded is None or not self.name:
            self.name = new_run()
        if loaded is None:
            self.changes = ()
            data.start_rollout()
        self.rollout_stats, self.rollout_figures, self.progress = {}, {}, Progress()
        self.unlogged_step, self.stepping = None, False
        self.lost_updates = LostUpdates()
        self.ahead.close()
        self.data, self.options = data, options
        self.max_over_ranks = partial(collectives.maximum, device=device)
        self.metrics, self.times = MetricLog(device, collectives), PhaseTimes(device)
        if loaded is not None:
            self.metrics.load(loaded["metrics"])
            self.progress = Progress.from_state(loaded, device, packed=options.packing, at=data.at)
            if not self.changed_names <= OF_UPDATES:
                self._discard_samples()
            self.ahead.load(self.progress.prefetched)

    def state(self, collectives: Collectives, reference: FrozenModel | None) -> dict[str, Any]:
        """Return the state of all ranks, in values that load under ``weights_only=True``. A collective."""
        return {
            "run": self.name,
            "configuration": self.configuration,
            "optimizer": None if self.optimizer is None else self.optimizer.description,
            "ranks": collectives.objects({**self.saved_progress.state(), "metrics": self.metrics.state()}),
            "reference_hash": None if reference is None else reference.fingerprint,
        }

    def load(
        self, state: Mapping[str, Any], parallel: Parallel, reference: FrozenModel | None, allowed: Collection[str]
    ) -> None:
        """Load this rank's part of a :meth:`state`.

        Args:
            state: State of all ranks.
            parallel: Strategy of the run.
            reference: Reference of the run.
            allowed: Options that may differ from those of the checkpoint.

        Raises:
            ValueError: If the checkpoint has other options, another number of ranks or another reference.
        """
        self.compare(state, allowed)
        warn_of_versions(state["configuration"], self.configuration)
        ranks, saved = state["ranks"], state["reference_hash"]
        fingerprint, world_size = None if reference is None else reference.fingerprint, parallel.ranks
        if len(ranks) != world_size:
            raise ValueError(
                f"expected a checkpoint of {world_size} ranks, got one of {len(ranks)}: resume with as many devices"
            )
        if fingerprint is not None and saved is not None and saved != fingerprint:
            raise ValueError(
                f"expected the reference of the checkpoint ({saved}), got another one ({fingerprint}): pass the "
                "reference= and policy= that the run began with"
            )
        recorded = state["configuration"]["module"]["model"]["init_args"]["max_tokens_per_microbatch"]
        mine = ranks[parallel.rank]
        version = state["configuration"]["versions"]["lightning_rl"]
        self.loaded = {**mine, "budget": mine["budget"] or (recorded, recorded), "version": version}
        self.name = state["run"]

    def compare(self, saved: Mapping[str, Any], allowed: Collection[str]) -> None:
        """Compare the configuration in a checkpoint with that of the run.

        Raises:
            ValueError: If an option differs that is not allowed to.
        """
        self.corrections.states()  # of before the load
        self.changes = check_resume(saved["configuration"], self.configuration, allowed)

    @property
    def changed_names(self) -> set[str]:
        """Names of the options that differ from the checkpoint."""
        return {path.partition(".")[0] for path, _, _ in self.changes}

    def optimizer_change(self, before: Mapping[str, Any] | None, allowed: Collection[str]) -> OptimizerChange | None:
        """Return the change of the optimizer or its schedule from a checkpoint; None without a change.

        Args:
            before: Description of the optimizer in the checkpoint; None in those of earlier versions.
            allowed: Names of options that may differ.

        Raises:
            ValueError: If the optimizer differs and is not allowed to, or if the checkpoint does not describe its
                optimizer.
        """
        changed, now = self.changed_names & {"optimizer", "lr_scheduler"}, cast(ConfiguredOptimizer, self.optimizer)
        if before is None:
            if changed:
                raise ValueError(
                    "expected a checkpoint that states the options of its optimizer, got one of an earlier version: "
                    f"resume without a change of {' and '.join(sorted(changed))}, or start a new run from its weights"
                )
            return None
        differences, other_rates = option_changes(before, now.description), rate_changes(before, now.description)
        refuse_differences([*differences, *other_rates], allowed)
        paths = [path for path, _, _ in differences]
        return OptimizerChange.of(before, now, paths, schedule="lr_scheduler" in changed or bool(other_rates))

    def _discard_samples(self) -> None:
        """Drop the samples of a checkpoint, which were made with other options."""
        if (current := self.progress.current) is not None:
            changed = ", ".join(sorted(self.changed_names - OF_UPDATES))
            rank_zero_info(
                f"rollout {current.number} was made with other options ({changed}): its remaining optimizer steps are "
                "skipped"
            )
        same_number = all(path != "data.prompts_per_rollout" for path, _, _ in self.changes)
        self.progress = self.progress.without_samples(keep_prompts=same_number)


def trainer_state(trainer: Trainer) -> TrainerState:
    """Return the progress of a fit as a ``TrainerState``, for reward functions written for TRL."""
    batches, passed = trainer.num_training_batches, trainer.fit_loop.epoch_loop.batch_progress.current.completed
    share = passed / batches if 0 < batches < math.inf else 0.0
    return TrainerState(
        global_step=trainer.global_step, max_steps=trainer.max_steps, epoch=trainer.current_epoch + min(share, 1.0)
    )


def row_counts(rollout: Rollout) -> dict[str, Stat]:
    """Count the rows and tokens of a finished rollout, and those that are left to train on."""
    masks = {"rows": rollout.real, "rewarded rows": rollout.rewarded, "trained tokens": rollout.valid_tokens}
    masks |= {"excluded rows": rollout.real & ~rollout.trained}
    advantages = torch.zeros(()) if rollout.advantages is None else rollout.advantages
    masks |= {"tokens with an advantage": rollout.valid_tokens & (advantages != 0)}
    counts = torch.stack([mask.sum() for mask in masks.values()]).tolist()
    return {name: stat.sum() for name, stat in Stat.numbers(dict(zip(masks, counts, strict=True))).items()}
