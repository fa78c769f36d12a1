"""StepMetrics: measures, logs and shows every optimizer step, as the first callback of a Trainer."""

from dataclasses import replace
from functools import partial
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_rl.corrections import StepTrace
from lightning_rl.data import StepIndex
from lightning_rl.distributed import Parallel
from lightning_rl.metrics import ends_row, log_rest, log_row
from lightning_rl.monitors import check_names, check_rollout_end, logs_itself
from lightning_rl.rollouts.rollout_log import RolloutLog
from lightning_rl.rollouts.state import RunState
from lightning_rl.rollouts.trained_module import TrainedModule
from lightning_rl.update import StepGradient
from lightning_rl.utils.stop_iteration import refuse_stop_iteration
from lightning_rl.utils.trainer import CoreCallback, show_phase


class StepMetrics(CoreCallback):
    """Callback of every run that logs its metrics.

    It precedes other callbacks, so that they find the metrics of a step in their ``on_train_batch_end``. An error
    here, of a logger or an observer, leaves the optimizer step complete.
    """

    _checked = False
    _log: RolloutLog

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._checked = False
        self._log = RolloutLog()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: StepIndex, batch_idx: int
    ) -> None:
        cast(TrainedModule, pl_module).run.times.start(partial(show_phase, trainer, batch.rollout))

    @override
    @refuse_stop_iteration
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StepIndex, batch_idx: int
    ) -> None:
        module = cast(TrainedModule, pl_module)
        run = module.run
        run.times.stop()
        run.count(batch.rollout)
        step, run.unlogged_step = run.unlogged_step, None
        if step is None:  # of a skipped rollout
            return
        measure(run, step, module.parallel.ranks)
        if step.trace is not None:
            run.corrections.observe_step(step.trace)
        ends = batch.step == module.steps_per_rollout - 1
        if ends:
            run.progress = replace(run.progress, current=None)
        axis = run.axis(batch.index)
        logs = ends_row(trainer.log_every_n_steps, module.steps_per_rollout, batch.index, axis)  # pyrefly: ignore[missing-attribute]
        row = log_row(trainer, run.metrics, axis, logs=logs)
        if not self._checked and not logs_itself(trainer, pl_module):
            check_names(trainer, run.metrics.names, evaluated=False)
        self._checked = True
        if ends:
            check_rollout_end(trainer, pl_module, old=run.metrics.names - row.keys())
            self._log.end_rollout(trainer, batch.rollout, row, run.rollout_figures, run.corrections, module.rewards)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the steps that have not been logged yet."""
        if trainer.log_every_n_steps:  # pyrefly: ignore[missing-attribute]
            module = cast(TrainedModule, pl_module)
            log_rest(trainer, module.run.metrics, module.run.axis(module.data_module.committed.index - 1))


def measure(run: RunState, step: StepGradient, ranks: int) -> None:
    """Add the statistics of an optimizer step to the metrics, and complete its trace."""
    if not step.tokens:
        return
    speed = step.tokens / run.times.seconds()
    stats = step.metrics(ranks, norm=step.norm, optim__lr=step.lr, tokens_per_second=speed)
    logged = [*(("microbatch", stats) for stats in step.stats), ("step", stats | run.times.take())]
    for group, stats in logged:
        run.metrics.add(group, stats)
        if step.trace is not None:
            step.trace.log(stats)
    if step.trace is not None:
        step.trace.norm, step.trace.made = step.norm, bool(step.made)


def begin_trace(run: RunState, step_index: StepIndex, parallel: Parallel) -> StepTrace | None:
    """Return a trace of the optimizer step that begins, if a callback observes it."""
    if not run.corrections.traces_step(step_index.rollout, step_index.step):
        return None
    trace = StepTrace(
        rollout_number=step_index.rollout, step=step_index.step, scale=parallel.ranks * parallel.loss_scale
    )
    trace.log(run.rollout_stats)
    return trace
