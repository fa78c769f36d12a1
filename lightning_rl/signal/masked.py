"""Masked statistics that ignore values outside the mask, NaN included."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

RESIDUE = 4e-14  # largest difference of sums that are equal up to rounding in float64, relative to them
GlobalSum = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks, in rank order; every rank calls it the same number of times."""


def local_sum(values: Tensor) -> Tensor:
    """Return the tensor itself: the :data:`GlobalSum` of a single rank."""
    return values


def masked_fill_invalid(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """Return ``values`` where ``mask`` is true and ``fill`` elsewhere, without gradient there.

    Multiplying by the mask would propagate NaN: ``0 * nan`` is NaN in value and gradient.
    """
    return torch.where(mask, values, torch.full_like(values, fill))


def are_equal(one: Tensor, other: Tensor) -> Bool[Tensor, "..."]:
    """Return True where float64 values are equal up to rounding of the sums that they come from; False for NaN."""
    return torch.isclose(one, other, rtol=RESIDUE, atol=0.0)


def row_mean(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Return the mean of each row over its mask, 0 for an empty row."""
    return masked_fill_invalid(values, mask).sum(-1) / mask.sum(-1).clamp(min=1)


def last_true(mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Return a mask of the last true entry of each row, all false for a row without one.

    Example:
        >>> last_true(torch.tensor([[True, True, False], [False, False, False]]))
        tensor([[False,  True, False],
                [False, False, False]])
    """
    later = mask.flip(-1).cumsum(-1).flip(-1)
    return mask & (later == 1)


class Moments(NamedTuple):
    """Mean and deviations of the masked values of all ranks, in float64."""

    number: Float[Tensor, ""]
    mean: Float[Tensor, ""]
    deviation: Float[Tensor, "..."]  # of each value from the mean; 0 at masked places
    squares: Float[Tensor, ""]  # sum of the squared deviations
    spread: Bool[Tensor, ""]  # True if the values are not all equal up to rounding, or one is NaN

    def std(self, *, unbiased: bool = True) -> Float[Tensor, ""]:
        """Return the standard deviation, 0 if the values are equal."""
        return (self.squares / (self.number - int(unbiased)).clamp(min=1)).sqrt() * self.spread


def global_moments(values: Tensor, mask: Tensor, global_sum: GlobalSum = local_sum) -> Moments:
    """Return the moments of masked values, in two passes in float64.

    ``spread`` is as in :func:`are_equal`.

    Args:
        values: Values of any shape.
        mask: Mask of the population, of the same shape.
        global_sum: Sums tensors over the ranks that share the population.
    """
    exact = masked_fill_invalid(values, mask).double()
    number = global_sum(mask.sum().double())
    mean = global_sum(exact.sum()) / number.clamp(min=1)
    deviation = torch.where(mask, exact - mean, 0.0)
    spread = global_sum((~are_equal(exact, mean) & mask).sum().double()) > 0
    return Moments(number, mean, deviation, global_sum(deviation.square().sum()), spread)


def whiten(
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    global_sum: GlobalSum = local_sum,
    *,
    shifted: bool = True,
    unbiased: bool = True,
    epsilon: float = 0.0,
) -> Float[Tensor, "B T"]:
    """Normalize the masked values of all ranks to mean 0 and standard deviation 1; 0 outside the mask.

    Equal values give exact zeros.

    Args:
        values: Values, shape [B, T].
        mask: Mask of the population, shape [B, T].
        global_sum: Sums tensors over the ranks that share the population.
        shifted: False to scale only and keep the mean.
        unbiased: Divide the variance by n - 1 instead of n.
        epsilon: Constant added to the standard deviation.
    """
    moments = global_moments(values, mask, global_sum)
    std = torch.where(moments.spread, moments.std(unbiased=unbiased) + epsilon, 1.0)
    centered = torch.where(moments.spread, moments.deviation, 0.0)
    return torch.where(mask, centered / std + (0.0 if shifted else moments.mean), 0.0).to(values.dtype)


def prefix_sums(values: Float[Tensor, "... T"]) -> Float[Tensor, "... T"]:
    """Return cumulative sums, with an order of additions that depends only on the length.

    CUDA's ``cumsum`` of floats raises under ``torch.use_deterministic_algorithms``.

    Source: Hillis and Steele 1986 (Data parallel algorithms).

    Example:
        >>> prefix_sums(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist()
        [1.0, 3.0, 6.0, 10.0]
    """
    shift = 1
    while shift < values.shape[-1]:
        values = values + functional.pad(values[..., :-shift], (shift, 0))
        shift *= 2
    return values


def group_numbers(groups: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Return each row's group, renumbered 0, 1, ... in order, without synchronizing with an accelerator."""
    ordered, order = groups.sort()
    begins = ordered.diff(prepend=ordered[:1]) != 0
    return torch.empty_like(order).scatter(0, order, begins.cumsum(0))


def group_index(groups: Int[Tensor, " B"]) -> tuple[Int[Tensor, " B"], int]:
    """Return :func:`group_numbers` and the number of groups."""
    index = group_numbers(groups)
    return index, int(index.max()) + 1 if len(groups) else 0
