"""Comparison of logged rows with the metrics expected over the steps since the previous row."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from typing_extensions import override

from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.live import LiveRun
from lightning_rl.audit.recomputed_metrics import microbatch_figures, rollout_figures, step_figures
from lightning_rl.audit.step_evidence import StepEvidence
from lightning_rl.corrections import Stat, StepTrace
from lightning_rl.metrics import ends_row
from lightning_rl.testing.properties.definitions import merge, population


class RowLogger(DummyLogger):
    """A logger that stores the latest row that the run's loggers get."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows[-1 if step is None else step] = dict(metrics)


class RowWatch:
    """Computes the expected next row and captures the logged one."""

    def __init__(self, live: LiveRun) -> None:
        self._live, self._logger = live, RowLogger()
        self._rollout: dict[str, Stat] = {}
        self._rollouts, self._complete = 0, True
        self._steps: list[dict[str, Stat]] = []
        self._handed, self._opened = set[str](), False
        self.missing: tuple[str, ...] = ()

    def open(self) -> None:
        """Add the logger before the core may write a row."""
        if self._live.trainer.loggers and self._logger not in self._live.trainer.loggers:
            self._live.trainer.loggers.append(self._logger)
            self._opened = True

    def close(self) -> None:
        """Remove the logger, so that other code finds only the loggers of the run."""
        if self._logger in self._live.trainer.loggers:
            self._live.trainer.loggers.remove(self._logger)

    def note(
        self,
        trace: StepTrace,
        evidence: Evidence,
        step: StepEvidence,
        measured: Mapping[str, Stat],
    ) -> dict[str, Stat]:
        """Return the expected metrics of a rollout and one of its steps, and add them to the next row."""
        algorithm, outputs = evidence.algorithm, step.outputs
        self._handed |= {name for name, parts in trace.logged.items() if _has_figure(parts[-1])}
        if trace.step == 0 or not self._rollout:
            self._rollouts += trace.step == 0
            self._rollout = rollout_figures(evidence.scored_rollout, evidence.number, algorithm)
            self._rollout |= measured
            self._rollout["rollout"] = population(torch.tensor([float(evidence.number)]), "max")
        parts = {} if step.recomputed is None or step.norm is None else step.recomputed.parts
        views = [microbatch.view for microbatch in trace.microbatches]
        figures = microbatch_figures(algorithm, views)
        figures |= step_figures(step.rows, outputs.logprobs, outputs.entropy, outputs.values, parts)
        figures |= _numbers(trace, step)
        self._steps.append(figures)
        return self._rollout | figures

    def end_step(self, step_index: int, *, seen: bool) -> tuple[dict[str, dict[str, float]], dict[str, Stat]]:
        """Return the row of an optimizer step as logged and as expected; empty if none was logged."""
        self._complete, self.missing = self._complete and seen, ()
        trainer: Any = self._live.trainer
        axis = self._live.row_number(step_index)
        if not ends_row(trainer.log_every_n_steps, self._live.options.steps_per_rollout, step_index, axis):
            return {}, {}
        whole = self._complete and self._rollouts <= 1 and self._live.parallel.ranks == 1
        row, expected = dict[str, dict[str, float]](), dict[str, Stat]()
        if self._opened and self._complete and self._rollouts <= 1:
            silent = {
                name
                for part in [self._rollout, *self._steps]
                for name, stat in part.items()
                if stat.value() != stat.value()
            }
            self.missing = tuple(sorted(self._handed - silent - self._logger.rows.get(axis, {}).keys()))
        if whole:
            expected = merge(self._steps) | self._rollout
            places = {
                "the loggers": self._logger.rows.pop(axis, {}),
                "callback_metrics": trainer.callback_metrics,
            }
            row = {
                place: {name: float(figure) for name, figure in figures.items() if name in expected}
                for place, figures in places.items()
            }
        self._steps, self._rollouts, self._complete, self._handed, self._opened = [], 0, True, set(), False
        self._logger.rows.clear()
        return row, expected


def _has_figure(moments: Tensor) -> bool:
    """Return True if a statistic has a finite value and so appears in the row."""
    count, mean = moments[:2].tolist()
    return count > 0 and math.isfinite(mean)


def _numbers(trace: StepTrace, step: StepEvidence) -> dict[str, Stat]:
    """Return scalars of a step: the norm before clipping, and the learning rate of the first parameter."""
    numbers = {} if trace.norm is None else {"optim/grad_norm": float(trace.norm)}
    first = next(iter(step.parameters.values()), None)
    if first is not None and first.held:
        numbers["optim/lr"] = first.lr
    return {name: population(torch.tensor([number], dtype=torch.float64)) for name, number in numbers.items()}
