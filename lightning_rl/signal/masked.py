"""Statistics over the masked entries of a tensor, in which a masked value, NaN included, takes no part."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

GlobalSum = Callable[[Tensor], Tensor]
"""Adds a tensor up over all ranks, in rank order; every rank calls it the same number of times."""


def local_sum(values: Tensor) -> Tensor:
    """The :data:`GlobalSum` of a single rank: the tensor itself."""
    return values


def masked_fill_invalid(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """``values`` where ``mask`` is true, ``fill`` elsewhere: neither value nor gradient leaks from a masked place.

    Multiplying by the mask would not do: ``0 * nan`` is NaN, in the value and in the gradient.
    """
    return torch.where(mask, values, torch.full_like(values, fill))


def row_mean(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Mean of each row over its masked-in entries; 0 for a row without any."""
    return masked_fill_invalid(values, mask).sum(-1) / mask.sum(-1).clamp(min=1)


def last_true(mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Marks the last true entry of each row; a row without any stays all false.

    Example:
        >>> last_true(torch.tensor([[True, True, False], [False, False, False]]))
        tensor([[False,  True, False],
                [False, False, False]])
    """
    later = mask.flip(-1).cumsum(-1).flip(-1)
    return mask & (later == 1)


class Moments(NamedTuple):
    """Mean and deviation of the masked-in values of all ranks, in float64."""

    number: Float[Tensor, ""]
    mean: Float[Tensor, ""]
    deviation: Float[Tensor, "..."]  # of each value from the mean; 0 at masked places
    squares: Float[Tensor, ""]  # sum of the squared deviations
    spread: Bool[Tensor, ""]  # whether the values differ at all

    def std(self, *, unbiased: bool = True) -> Float[Tensor, ""]:
        """The standard deviation; 0 if the values do not differ."""
        return (self.squares / (self.number - int(unbiased)).clamp(min=1)).sqrt() * self.spread


def global_moments(values: Tensor, mask: Tensor, global_sum: GlobalSum = local_sum) -> Moments:
    """Two passes in float64, so that a large offset costs no precision.

    Whether values differ is a test and not an epsilon: in float64 the mean of equal float32 values is exact up to
    rounding of the sum. A NaN counts as differing, so that it shows.

    Args:
        values: of any shape.
        mask: the population, of the same shape.
        global_sum: adds tensors up over the ranks that share the population.
    """
    exact = masked_fill_invalid(values, mask).double()
    number = global_sum(mask.sum().double())
    mean = global_sum(exact.sum()) / number.clamp(min=1)
    deviation = torch.where(mask, exact - mean, 0.0)
    rounding = 4 * torch.finfo(torch.float64).eps * mean.abs()
    spread = global_sum((~(deviation.abs() <= rounding)).sum().double()) > 0
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
    r"""Shifts and scales the masked-in values of all ranks to mean 0 and standard deviation 1; 0 at masked places.

    Values that do not differ give zeros, by test and not by an epsilon in the denominator.

    Args:
        values: shape [B, T].
        mask: the population, shape [B, T].
        global_sum: adds tensors up over the ranks that share the population.
        shifted: False to scale alone and keep the mean.
        unbiased: whether the variance divides by n - 1 instead of n.
        epsilon: added to the standard deviation.
    """
    moments = global_moments(values, mask, global_sum)
    std = torch.where(moments.spread, moments.std(unbiased=unbiased) + epsilon, 1.0)
    centred = torch.where(moments.spread, moments.deviation, 0.0)
    return torch.where(mask, centred / std + (0.0 if shifted else moments.mean), 0.0).to(values.dtype)


def prefix_sums(values: Float[Tensor, "... T"]) -> Float[Tensor, "... T"]:
    """Sums of the values up to each one, in an order that their number alone decides.

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
    """Each row's group, numbered 0, 1, ... in their order. An accelerator is not waited for."""
    ordered, order = groups.sort()
    begins = ordered.diff(prepend=ordered[:1]) != 0
    return torch.empty_like(order).scatter(0, order, begins.cumsum(0))


def group_index(groups: Int[Tensor, " B"]) -> tuple[Int[Tensor, " B"], int]:
    """:func:`group_numbers`, and how many groups there are."""
    index = group_numbers(groups)
    return index, int(index.max()) + 1 if len(groups) else 0
