"""Rollout summary: one line per rollout in the terminal."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_rl.corrections import RLCallback
from lightning_rl.data import StepIndex
from lightning_rl.glossary import entry_of
from lightning_rl.module import RLLightningModule
from lightning_rl.utils.arguments import check_counts
from lightning_rl.utils.trainer import show_line

COLUMNS: Mapping[str, str] = {
    "reward/task": "reward",
    "kl/rollout": "kl",
    "policy/entropy": "entropy",
    "length/mean": "length",
    "length/truncated": "truncated",
    "groups/zero_variance": "equal",
    "optim/grad_norm": "norm",
    "ledger/weight/used": "used",
    "signal_audit/findings": "findings",
    "tokens_per_second": "tokens/s",
}
"""Metrics of a line in order, with their column headers."""
SHARES = {metric for metric in COLUMNS if (entry := entry_of(metric)) is not None and entry.unit == "share"}
HEADER_EVERY = 20  # lines, so that one header is on the screen
WIDTH = 7  # of a column


class RolloutSummary(RLCallback):
    """Prints one line per rollout after its last optimizer step.

    Columns: reward, mismatch, entropy, length, gradient norm and speed, and those of a ledger and an audit if present.
    A value outside of the normal range (docs/metrics.md) has an exclamation mark; a dash means no value. The header is
    printed above the first line, every twentieth line, and a line with a new metric. It does not change the signal.

    Args:
        every_n_rollouts: Interval between lines.

    Raises:
        ValueError: If it is below 1.

    Example:
        >>> columns = ["reward/task", "kl/rollout", "length/truncated"]
        >>> print(summary_header(columns))
        rollout   reward       kl  truncated
        >>> print(summary_line(3, {"reward/task": 0.5, "kl/rollout": 0.2, "length/truncated": 0.05}, columns))
              3    0.500    0.200!        5%
    """

    name = "rollout_summary"
    prints_rollouts = True

    def __init__(self, every_n_rollouts: int = 1) -> None:
        check_counts(1, every_n_rollouts=every_n_rollouts)
        self.every_n_rollouts = every_n_rollouts
        self._columns: list[str] = []
        self._lines = 0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StepIndex, batch_idx: int
    ) -> None:
        if not isinstance(pl_module, RLLightningModule) or batch.step < pl_module.steps_per_rollout - 1:
            return
        if batch.rollout % self.every_n_rollouts == 0 and not pl_module.run.skips(batch):
            self.show(trainer, batch.rollout, pl_module.run.metrics.values())  # a collective

    def show(self, trainer: Trainer, rollout: int, figures: Mapping[str, float]) -> None:
        """Print the line of a rollout, and the header if it is due."""
        columns = [metric for metric in COLUMNS if metric in figures or metric in self._columns]
        if columns != self._columns or self._lines % HEADER_EVERY == 0:
            show_line(trainer, summary_header(columns))
            self._columns, self._lines = columns, 0
        show_line(trainer, summary_line(rollout, figures, columns))
        self._lines += 1


def summary_header(columns: Sequence[str]) -> str:
    """Return the header of the given metrics."""
    return "  ".join(["rollout", *(f"{COLUMNS[metric]:>{WIDTH}}" for metric in columns)])


def summary_line(rollout: int, figures: Mapping[str, float], columns: Sequence[str]) -> str:
    """Return the line of a rollout, aligned with its header; marks are in the gaps."""
    cells = [_cell(metric, figures) for metric in columns]
    return f"{rollout:>{len('rollout')}} {''.join(cells)}".rstrip()


def _cell(metric: str, figures: Mapping[str, float]) -> str:
    entry, value = entry_of(metric), figures.get(metric, math.nan)
    beyond = entry is not None and entry.is_beyond(value, figures.get(entry.baseline, 0.0))
    return f" {_figure(metric, value):>{max(WIDTH, len(COLUMNS[metric]))}}{'!' if beyond else ' '}"


def _figure(metric: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    if metric in SHARES:
        return f"{value:.0%}"
    if math.isfinite(value) and (abs(value) >= 1000 or value.is_integer()):
        return f"{value:.0f}"
    text = f"{value:#.3g}".rstrip(".")
    return text if len(text) <= WIDTH else f"{value:.0e}"
