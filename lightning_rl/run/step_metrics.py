"""StepMetrics: measures, logs and shows every optimizer step, as the first callback of a Trainer."""

from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_rl.data import StepIndex
from lightning_rl.metrics import ends_row, log_rest, log_row
from lightning_rl.monitors import check_names, check_rollout_end, logs_itself
from lightning_rl.run.run import run_of
from lightning_rl.utils.stop_iteration import refuse_stop_iteration
from lightning_rl.utils.trainer import CoreCallback, show_phase


class StepMetrics(CoreCallback):
    """Callback of every run that logs its metrics.

    It precedes other callbacks, so that they find the metrics of a step in their ``on_train_batch_end``. An error
    here, of a logger or an observer, leaves the optimizer step complete.
    """

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: StepIndex, batch_idx: int
    ) -> None:
        run_of(trainer).log.times.start(partial(show_phase, trainer, batch.rollout))

    @override
    @refuse_stop_iteration
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StepIndex, batch_idx: int
    ) -> None:
        run = run_of(trainer)
        log, steps = run.log, run.options.steps_per_rollout
        log.times.stop()
        log.count(batch.rollout, run.progress.skipped)
        step, log.step = log.step, None
        if step is None:  # of a skipped rollout
            return
        log.measure(step, run.parallel.ranks)
        if step.trace is not None:
            run.corrections.observe_step(step.trace)
        ends = batch.step == steps - 1
        if ends:
            run.progress.current = None
            run.ahead.spans.end(batch.rollout)
        axis = run.progress.axis(batch.index)
        logs = ends_row(trainer.log_every_n_steps, steps, batch.index, axis)  # pyrefly: ignore[missing-attribute]
        row = log_row(trainer, log.metrics, axis, logs=logs)
        if not log.checked and not logs_itself(trainer, pl_module):
            check_names(trainer, log.metrics.names, evaluated=False)
        log.checked = True
        if ends:
            check_rollout_end(trainer, pl_module, old=log.metrics.names - row.keys())
            log.lines.end_rollout(
                trainer, batch.rollout, row, log.rollout_figures, run.corrections, run.options.rewards
            )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the steps that have not been logged yet."""
        if trainer.log_every_n_steps:  # pyrefly: ignore[missing-attribute]
            run = run_of(trainer)
            log_rest(trainer, run.metrics, run.progress.axis(run.progress.data.committed.index - 1))
