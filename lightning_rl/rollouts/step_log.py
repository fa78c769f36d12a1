"""Metrics of a fit, from their computation in a step to the row of the loggers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lightning_rl.corrections import Corrections, Stat, StepTrace
from lightning_rl.data import StepIndex
from lightning_rl.distributed import Parallel
from lightning_rl.metrics import MetricLog, PhaseTimes
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.lost_updates import LostUpdates
from lightning_rl.rollouts.rollout_log import RolloutLog
from lightning_rl.update import StepGradient


@dataclass(slots=True, kw_only=True)
class StepLog:
    """Metrics of a fit that have not been logged yet.

    Attributes:
        metrics: Metrics of all steps since the last row.
        times: Seconds by phase.
        rollout_stats: Logged metrics of the current rollout.
        rollout_figures: Their values over all ranks, with those of rewards and the numbers of rows and tokens.
        constant_calls: Calls of reward functions that all returned one constant in the last rollout, as text.
        step: Optimizer step whose metrics are not in ``metrics`` yet.
        lost_updates: Measurement of steps that are lost in the rounding of the weights.
        lines: Lines and warnings at the ends of rollouts.
        checked: True once the names of the metrics of a step were compared with those that callbacks monitor.
        shows_sample: True until a sample of the first rollout is shown.
    """

    metrics: MetricLog = field(default_factory=MetricLog)
    times: PhaseTimes = field(default_factory=PhaseTimes)
    rollout_stats: dict[str, Stat] = field(default_factory=dict)
    rollout_figures: Mapping[str, float] = field(default_factory=dict)
    constant_calls: str = ""
    step: StepGradient | None = None
    lost_updates: LostUpdates = field(default_factory=LostUpdates)
    lines: RolloutLog = field(default_factory=RolloutLog)
    checked: bool = False
    shows_sample: bool = True

    def begin_rollout(self, rollout: Rollout, stats: Mapping[str, Stat], logged: Mapping[str, Stat]) -> None:
        """Add the metrics of a finished rollout; every rank has to call this.

        Args:
            rollout: Finished rollout.
            stats: Its metrics, without times.
            logged: Metrics that reward functions and environments logged.
        """
        self.rollout_stats = {**stats, **self.times.take(), **self.times.idle()}
        self.rollout_figures = self.metrics.values_of({**self.rollout_stats, **logged, **row_counts(rollout)})
        self.metrics.add("rollout", self.rollout_stats)
        self.metrics.add("noted", logged)

    def begin_trace(self, step_index: StepIndex, corrections: Corrections, parallel: Parallel) -> StepTrace | None:
        """Return a trace of the optimizer step that begins, if a callback observes it."""
        if not corrections.traces_step(step_index.rollout, step_index.step):
            return None
        scale = parallel.ranks * parallel.loss_scale
        trace = StepTrace(rollout_number=step_index.rollout, step=step_index.step, scale=scale)
        trace.log(self.rollout_stats)
        return trace

    def measure(self, step: StepGradient, ranks: int) -> None:
        """Add the statistics of an optimizer step to the metrics, and complete its trace."""
        if not step.tokens:
            return
        speed = step.tokens / self.times.seconds()
        stats = step.metrics(ranks, norm=step.norm, optim__lr=step.lr, tokens_per_second=speed)
        logged = [*(("microbatch", stats) for stats in step.stats), ("step", stats | self.times.take())]
        for group, stats in logged:
            self.metrics.add(group, stats)
            if step.trace is not None:
                step.trace.log(stats)
        if step.trace is not None:
            step.trace.norm, step.trace.made = step.norm, bool(step.made)

    def count(self, number: int, skipped: int) -> None:
        """Add the number of the rollout and the number of skipped optimizer steps."""
        counters = Stat.numbers({"optim/skipped": skipped, "rollout": number})
        self.metrics.add("counter", {name: stat.maximum() for name, stat in counters.items()})


def row_counts(rollout: Rollout) -> dict[str, Stat]:
    """Count the rows and tokens of a finished rollout, and those that are left to train on."""
    masks = {"rows": rollout.real, "rewarded rows": rollout.rewarded, "trained tokens": rollout.valid_tokens}
    masks |= {"excluded rows": rollout.real & ~rollout.trained}
    advantages = torch.zeros(()) if rollout.advantages is None else rollout.advantages
    masks |= {"tokens with an advantage": rollout.valid_tokens & (advantages != 0)}
    counts = torch.stack([mask.sum() for mask in masks.values()]).tolist()
    return {name: stat.sum() for name, stat in Stat.numbers(dict(zip(masks, counts, strict=True))).items()}
