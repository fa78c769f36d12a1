"""Statistics of scores per group or batch, over the rewarded rows, in float64 and two passes."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rl.signal.masked import GlobalSum, are_equal, global_moments, group_index, local_sum, masked_fill_invalid


class Population(NamedTuple):
    """Statistics of each row's group or batch over its rewarded rows; every field has shape [B]."""

    number: Float[Tensor, " B"]  # number of rewarded rows
    mean: Float[Tensor, " B"]
    squares: Float[Tensor, " B"]  # sum of the squared deviations from the mean
    spread: Bool[Tensor, " B"]  # the row is rewarded, and the rewards are not all equal up to rounding, or one is NaN

    def std(self, *, unbiased: bool = True) -> Float[Tensor, " B"]:
        """Return the standard deviation, 0 for fewer than two rows."""
        return (self.squares / (self.number - int(unbiased)).clamp(min=1)).sqrt()


def group_statistics(
    scores: Float[Tensor, " B"], groups: Int[Tensor, " B"], rewarded: Bool[Tensor, " B"]
) -> Population:
    """Return the statistics of each row's group over its rewarded rows. All rows of a group are on one rank."""
    index, number = group_index(groups)
    exact = masked_fill_invalid(scores, rewarded).double()

    def per_group(values: Tensor) -> Tensor:
        return torch.zeros(number, dtype=torch.float64, device=values.device).index_add_(0, index, values)[index]

    def extreme(reduce: str) -> Tensor:
        start = torch.zeros(number + 1, dtype=torch.float64, device=exact.device)
        return start.scatter_reduce(0, torch.where(rewarded, index, number), exact, reduce, include_self=False)[index]

    count = per_group(rewarded.double())
    mean = per_group(exact) / count.clamp(min=1)
    squares = per_group(torch.where(rewarded, exact - mean, 0.0).square())
    spread = rewarded & ~are_equal(extreme("amax"), extreme("amin"))
    return Population(count, mean, squares, spread)


def batch_statistics(
    scores: Float[Tensor, " B"], rewarded: Bool[Tensor, " B"], global_sum: GlobalSum = local_sum
) -> Population:
    """Return the statistics over the rewarded rows of all ranks, equal for every row."""
    batch = global_moments(scores, rewarded, global_sum)
    return Population(
        batch.number.expand(len(scores)),
        batch.mean.expand(len(scores)),
        batch.squares.expand(len(scores)),
        batch.spread & rewarded,
    )
