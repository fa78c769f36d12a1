"""Rollout summary: one line for each rollout that a person can follow, in the terminal."""

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_rl.arguments import check_counts
from lightning_rl.corrections import RLCallback
from lightning_rl.data import Ticket
from lightning_rl.module import RLLightningModule
from lightning_rl.progress import show_line
from lightning_rl.reporting.glossary import entry_of

COLUMNS: Mapping[str, str] = {
    "reward/task": "reward",
    "kl/rollout": "kl",
    "policy/entropy": "entropy",
    "length/mean": "length",
    "length/truncated": "cut off",
    "groups/zero_variance": "equal groups",
    "optim/grad_norm": "norm",
    "ledger/weight/used": "used",
    "signal_audit/findings": "findings",
    "tokens_per_second": "tokens/s",
}
"""Metrics of a line, in their order, by the words that stand before them."""
SHARES = {metric for metric in COLUMNS if (entry := entry_of(metric)) is not None and entry.unit == "share"}


class RolloutSummary(RLCallback):
    """Says in one line what a rollout was, when its last optimizer step is made.

    Reward, mismatch, entropy, length, gradient norm and speed; what a ledger and an audit add if they are there. A
    figure beyond what is normal (docs/metrics.md) has an exclamation mark. It takes no part in the signal.

    Args:
        every_n_rollouts: how often.

    Raises:
        ValueError: if it is below 1.

    Example:
        >>> summary_line(3, {"reward/task": 0.5, "kl/rollout": 0.2, "length/truncated": 0.05})
        'rollout 3  reward 0.5  kl 0.2!  cut off 5%'
    """

    name = "rollout_summary"

    def __init__(self, every_n_rollouts: int = 1) -> None:
        check_counts(1, every_n_rollouts=every_n_rollouts)
        self.every_n_rollouts = every_n_rollouts

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Ticket, batch_idx: int
    ) -> None:
        if not isinstance(pl_module, RLLightningModule) or batch.step < pl_module.steps_per_rollout - 1:
            return
        if batch.rollout % self.every_n_rollouts == 0 and batch.rollout not in pl_module.skip_rollouts:
            show_line(trainer, summary_line(batch.rollout, pl_module.run.metrics.values()))  # a collective


def summary_line(rollout: int, figures: Mapping[str, float]) -> str:
    """The line of a rollout, with those figures that there are."""
    known = {metric: figures[metric] for metric in COLUMNS if metric in figures}
    cells = [f"{COLUMNS[metric]} {_figure(metric, value)}" for metric, value in known.items()]
    return "  ".join([f"rollout {rollout}", *cells])


def _figure(metric: str, value: float) -> str:
    entry = entry_of(metric)
    low, high = (None, None) if entry is None else (entry.low, entry.high)
    beyond = (low is not None and value < low) or (high is not None and value > high)
    if metric in SHARES:
        text = f"{value:.0%}"
    else:
        text = f"{value:.0f}" if abs(value) >= 1000 and math.isfinite(value) else f"{value:.3g}"
    return text + "!" * beyond
