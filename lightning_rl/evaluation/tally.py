"""Tally: sums over the samples of each prompt, as a torchmetrics Metric."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_rl.distributed import ALONE, Collectives
from lightning_rl.evaluation.estimators import interval, pass_at_k

COLUMNS = ("samples", "rewarded", "failed", "decided", "solved", "answered", "vote", "length", "truncated", "task")


class Tally(Metric):
    """Table with one row per prompt, which one rank fills and all others leave 0.

    The sum over ranks is therefore exact, and metrics do not depend on batches or ranks, bitwise.

    Args:
        prompts: Number P of prompts.
        rewards: Names of the reward functions.
        collectives: Collectives over the ranks.
    """

    full_state_update = False
    table: Tensor

    def __init__(self, prompts: int, rewards: Sequence[str], collectives: Collectives = ALONE) -> None:
        super().__init__(process_group=collectives.rows, distributed_available_fn=lambda: collectives.ranks > 1)
        self.rewards = tuple(rewards)
        width = len(COLUMNS) + 2 * len(self.rewards)
        self.add_state("table", torch.zeros(prompts, width, dtype=torch.float64), dist_reduce_fx="sum")

    @override
    def update(self, places: Int[Tensor, " p"], rows: Float[Tensor, "p C"]) -> None:
        """Fill the rows of some prompts: :data:`COLUMNS`, then the sum and number of samples of each reward."""
        self.table[places] = rows.to(self.table)

    @override
    def compute(self) -> Float[Tensor, "P C"]:
        """Return the table summed over ranks."""
        return self.table

    def figures(self, *, pass_at: Sequence[int], samples: int, votes: bool) -> dict[str, float]:
        """Return the metrics by name. A collective.

        A prompt counts in ``pass@k``, ``avg@k`` and ``maj@k`` if at least k of its samples have a score of the function
        that decides; in ``maj@k``, one of them also needs an answer. The names are always the same; a mean over nothing
        is NaN.
        """
        rows = self.compute().cpu().tolist()
        shares = _shares(rows, pass_at=pass_at, samples=samples, votes=votes)
        figures: dict[str, float] = {}
        for name, values in shares.items():
            low, high = interval(values, samples) if values else (math.nan, math.nan)
            figures |= {name: mean(math.fsum(values), len(values)), f"{name}_low": low, f"{name}_high": high}
        return figures | self._means(rows, votes=votes)

    def _means(self, rows: Sequence[Sequence[float]], *, votes: bool) -> dict[str, float]:
        """Return means over samples, and the number of failed rewards and answers."""
        width = len(COLUMNS) + 2 * len(self.rewards)
        sums = [math.fsum(column) for column in zip(*rows, strict=True)] or [0.0] * width
        drawn, rewarded, failed, _, _, answered, _, length, truncated, task, *raw = sums
        means = {"reward/task": (task, rewarded), "reward/missing": (drawn - rewarded, drawn)}
        means |= {f"reward/{name}": (raw[2 * at], raw[2 * at + 1]) for at, name in enumerate(self.rewards)}
        means |= {"length/mean": (length, drawn), "length/truncated": (truncated, drawn)}
        numbers = {"reward/failed": failed, **({"answer/failed": drawn - answered} if votes else {})}
        return {name: mean(total, count) for name, (total, count) in means.items()} | numbers


def mean(total: float, count: float) -> float:
    """Return the mean, or NaN for an empty population."""
    return total / count if count else math.nan


def _shares(
    rows: Sequence[Sequence[float]], *, pass_at: Sequence[int], samples: int, votes: bool
) -> dict[str, list[float]]:
    """Return the values in [0, 1] of the prompts that count, by metric."""
    scored = [(int(n), int(solved), answered > 0, vote) for _, _, _, n, solved, answered, vote, *_ in rows]
    shares = {f"pass@{k}": [pass_at_k(n, solved, k) for n, solved, *_ in scored if n >= k] for k in pass_at}
    if samples > 1:
        shares[f"avg@{samples}"] = [solved / n for n, solved, *_ in scored if n >= samples]
    if votes:
        shares[f"maj@{samples}"] = [vote for n, _, answered, vote in scored if n >= samples and answered]
    return shares
