"""Stat: what is known about a population of numbers, mergeable over microbatches and ranks in any split."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rl.transfer import to_device

StatReduction = Literal["mean", "max", "std", "ess", "sum"]


@dataclass(frozen=True, slots=True)
class Stat:
    """Count, mean, sum of squared deviations and maximum of a population, and which figure of it is logged.

    Example:
        >>> stat = Stat.of(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[True, True, False]]))
        >>> stat.value(), stat.std().value()
        (2.0, 1.4142135623730951)
    """

    moments: Float[Tensor, "4"]  # float64: count, mean, squared deviations, maximum
    reduction: StatReduction = "mean"

    @staticmethod
    def of(values: Tensor, mask: Tensor | None = None) -> "Stat":
        """The masked-in values; what lies outside the mask, NaN included, takes no part. Detached."""
        everywhere = torch.ones_like(values, dtype=torch.bool)
        return Stat.many({"": values}, everywhere if mask is None else mask)[""]

    @staticmethod
    def many(values: Mapping[str, Tensor], mask: Bool[Tensor, "..."]) -> "dict[str, Stat]":
        """One Stat for each named tensor over the same mask, in a handful of tensor operations altogether."""
        stacked = torch.stack([tensor.detach().double().flatten() for tensor in values.values()])
        kept = mask.flatten()
        count = kept.sum().double()
        mean = torch.where(kept, stacked, 0.0).sum(-1) / count.clamp(min=1)
        squares = torch.where(kept, stacked - mean[:, None], 0.0).square().sum(-1)
        floor = stacked.new_full((len(stacked), 1), -torch.inf)
        maximum = torch.cat([torch.where(kept, stacked, -torch.inf), floor], -1).amax(-1)
        moments = torch.stack([count.expand_as(mean), mean, squares, maximum], -1)
        return {name: Stat(row) for name, row in zip(values, moments.unbind(), strict=True)}

    @staticmethod
    def singles(values: Mapping[str, Tensor]) -> "dict[str, Stat]":
        """A population of one number for each name, or an empty one if the number is not finite."""
        device = next(iter(values.values())).device
        exact = torch.stack([to_device(value.detach().double(), device) for value in values.values()])
        finite = torch.isfinite(exact)
        mean, maximum = torch.where(finite, exact, 0.0), torch.where(finite, exact, -torch.inf)
        moments = torch.stack([finite.double(), mean, torch.zeros_like(exact), maximum], -1)
        return {name: Stat(row) for name, row in zip(values, moments.unbind(), strict=True)}

    @staticmethod
    def numbers(values: Mapping[str, float]) -> "dict[str, Stat]":
        """The same of plain numbers, on the CPU."""
        rows = [(1.0, x, 0.0, x) if math.isfinite(x) else (0.0, 0.0, 0.0, -math.inf) for x in values.values()]
        moments = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)
        return {name: Stat(row) for name, row in zip(values, moments.unbind(), strict=True)}

    @staticmethod
    def single(value: float | Tensor) -> "Stat":
        """A population of one number."""
        exact = torch.as_tensor(value, dtype=torch.float64).detach()
        return Stat(torch.stack([torch.ones_like(exact), exact, torch.zeros_like(exact), exact]))

    def maximum(self) -> "Stat":
        """The same population, logging its maximum."""
        return replace(self, reduction="max")

    def std(self) -> "Stat":
        """The same population, logging its unbiased standard deviation."""
        return replace(self, reduction="std")

    def sum(self) -> "Stat":
        """The same population, logging its sum."""
        return replace(self, reduction="sum")

    def ess(self) -> "Stat":
        """The same population taken as weights, logging the effective share of samples (sum w)^2 / (n sum w^2)."""
        return replace(self, reduction="ess")

    def value(self) -> float:
        """The figure that is logged; NaN for an empty population."""
        return reduce_moments(self.moments.tolist(), self.reduction)


def stack_moments(stats: Sequence[Stat], device: torch.device | str) -> Float[Tensor, "K 4"]:
    """The moments of some statistics on one device; what comes from another one is copied together."""
    devices, rows = {stat.moments.device for stat in stats}, dict[int, Tensor]()
    if len(devices) == 1:
        return to_device(torch.stack([stat.moments for stat in stats]), device)
    for other in devices:
        places = [place for place, stat in enumerate(stats) if stat.moments.device == other]
        together = to_device(torch.stack([stats[place].moments for place in places]), device)
        rows |= dict(zip(places, together.unbind(), strict=True))
    return torch.stack([rows[place] for place in range(len(stats))])


def merge_moments(parts: Float[Tensor, "N *K 4"]) -> Float[Tensor, "*K 4"]:
    """Joins N disjoint populations into one, in the order given.

    Source: Chan, Golub and LeVeque 1983, the multiway form.
    """
    count, mean, squares, maximum = parts.unbind(-1)
    total = count.sum(0)
    joint = (count * mean).sum(0) / total.clamp(min=1)
    deviation = (squares + count * (mean - joint).square()).sum(0)
    return torch.stack([total, joint, deviation, maximum.amax(0)], -1)


FIGURES: Mapping[StatReduction, Callable[[float, float, float, float], float]] = {
    "mean": lambda _count, mean, _squares, _maximum: mean,
    "max": lambda _count, _mean, _squares, maximum: maximum,
    "std": lambda count, _mean, squares, _maximum: math.sqrt(squares / max(count - 1, 1)),
    "ess": lambda count, mean, squares, _maximum: 1 / (1 + squares / count / mean**2) if mean**2 > 0 else math.nan,
    "sum": lambda count, mean, _squares, _maximum: mean * count,
}
"""What is logged of a population that is not empty, from its count, mean, squared deviations and maximum."""


def reduce_moments(moments: Sequence[float], reduction: StatReduction) -> float:
    """One figure of a population, given as count, mean, squared deviations and maximum; NaN if it is empty."""
    return FIGURES[reduction](*moments) if moments[0] else math.nan


def disjoint(*parts: Mapping[str, Stat]) -> dict[str, Stat]:
    """Joins statistics.

    Raises:
        ValueError: naming a key that two parts have.
    """
    joined: dict[str, Stat] = {}
    for part in parts:
        twice = joined.keys() & part.keys()
        if twice:
            raise ValueError(f"expected each metric from one place, got {sorted(twice)[0]} from two")
        joined |= part
    return joined
