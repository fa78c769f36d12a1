"""Tally: what the samples of each prompt came to, as a torchmetric, and the figures that follow from it."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_rl.distributed import ALONE, Collectives
from lightning_rl.evaluation.estimators import interval, pass_at_k

COLUMNS = ("samples", "rewarded", "failed", "solved", "answered", "vote", "length", "truncated", "task")


class Tally(Metric):
    """A table with a row for each prompt of an evaluation, which one rank fills and all others leave 0.

    So the sum over ranks is exact, and figures are computed once, from whole rows in the order of the prompts: they do
    not depend on batches and ranks, to the last bit.

    Args:
        prompts: P, how many the evaluation has.
        rewards: names of the reward functions.
        collectives: what the ranks do together.
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
        """Fills the rows of some prompts: :data:`COLUMNS`, then value and number of samples of each reward, summed."""
        self.table[places] = rows.to(self.table)

    @override
    def compute(self) -> Float[Tensor, "P C"]:
        """The table of all ranks."""
        return self.table

    def figures(self, *, pass_at: Sequence[int], samples: int, votes: bool) -> dict[str, float]:
        """What the table says, by the name of the metric. A collective.

        A sample without a reward is as if it had not been drawn: a prompt counts in ``pass@k``, ``avg@k`` and ``maj@k``
        if at least k of its samples have one; in ``maj@k`` besides if one of them has been read. The names are always
        the same: a mean over nothing is NaN.

        Args:
            pass_at: each k.
            samples: of each prompt.
            votes: whether the samples have answers.
        """
        rows = self.compute().cpu().tolist()
        shares = _shares(rows, pass_at=pass_at, samples=samples, votes=votes)
        figures: dict[str, float] = {}
        for name, values in shares.items():
            low, high = interval(values, samples) if values else (math.nan, math.nan)
            figures |= {name: mean(math.fsum(values), len(values)), f"{name}_low": low, f"{name}_high": high}
        return figures | self._means(rows, votes=votes)

    def _means(self, rows: Sequence[Sequence[float]], *, votes: bool) -> dict[str, float]:
        """Means over samples, and how many rewards and answers failed on."""
        width = len(COLUMNS) + 2 * len(self.rewards)
        sums = [math.fsum(column) for column in zip(*rows, strict=True)] or [0.0] * width
        drawn, rewarded, failed, _, answered, _, length, truncated, task, *raw = sums
        means = {"reward/task": (task, rewarded), "reward/missing": (drawn - rewarded, drawn)}
        means |= {f"reward/{name}": (raw[2 * at], raw[2 * at + 1]) for at, name in enumerate(self.rewards)}
        means |= {"length/mean": (length, drawn), "length/truncated": (truncated, drawn)}
        numbers = {"reward/failed": failed, **({"answer/failed": drawn - answered} if votes else {})}
        return {name: mean(total, count) for name, (total, count) in means.items()} | numbers


def mean(total: float, count: float) -> float:
    """The mean of a population; NaN for none."""
    return total / count if count else math.nan


def _shares(
    rows: Sequence[Sequence[float]], *, pass_at: Sequence[int], samples: int, votes: bool
) -> dict[str, list[float]]:
    """The value in [0, 1] of each prompt that counts, by metric."""
    scored = [(int(n), int(solved), answered > 0, vote) for _, n, _, solved, answered, vote, *_ in rows]
    shares = {f"pass@{k}": [pass_at_k(n, solved, k) for n, solved, *_ in scored if n >= k] for k in pass_at}
    if samples > 1:
        shares[f"avg@{samples}"] = [solved / n for n, solved, *_ in scored if n >= samples]
    if votes:
        shares[f"maj@{samples}"] = [vote for n, _, answered, vote in scored if n >= samples and answered]
    return shares
