"""Stat: statistics of a population that merge over microbatches and ranks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rl.utils.device import to_device

StatReduction = Literal["mean", "max", "std", "ess", "sum"]


@dataclass(frozen=True, slots=True)
class Stat:
    """Count, mean, sum of squared deviations and maximum of a population, and the reduction to log.

    Example:
        >>> stat = Stat.of(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[True, True, False]]))
        >>> stat.value(), stat.std().value()
        (2.0, 1.4142135623730951)
    """

    moments: Float[Tensor, "4"]  # float64: count, mean, squared deviations, maximum
    reduction: StatReduction = "mean"

    @staticmethod
    def of(values: Tensor, mask: Tensor | None = None) -> "Stat":
        """Return the statistics of the masked values, detached; values outside the mask are ignored, NaN included."""
        mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        return Stat.many({"": values}, mask)[""]

    @staticmethod
    def many(values: Mapping[str, Tensor], mask: Bool[Tensor, "..."]) -> "dict[str, Stat]":
        """Return one Stat per named tensor over the same mask, with few tensor operations."""
        tensors = list(values.values())
        if len({tensor.dtype for tensor in tensors}) > 1:  # stacking would round integers to float32
            tensors = [tensor.double() for tensor in tensors]
        stacked, left_out = torch.stack(tensors).detach().double().reshape(len(tensors), mask.numel()), ~mask.flatten()
        count = mask.sum(dtype=torch.float64)
        mean = stacked.masked_fill_(left_out, 0.0).sum(-1) / count.clamp(min=1)
        squares = (stacked - mean[:, None]).masked_fill_(left_out, 0.0).square_().sum(-1)
        stacked.masked_fill_(left_out, -torch.inf)
        maximum = stacked.amax(-1) if len(left_out) else torch.full_like(mean, -torch.inf)
        moments = torch.stack([count.expand_as(mean), mean, squares, maximum], -1)
        return {name: Stat(row) for name, row in zip(values, moments.unbind(), strict=True)}

    @staticmethod
    def numbers(values: Mapping[str, float]) -> "dict[str, Stat]":
        """Return one Stat of a single number per name, on the CPU; empty if the number is not finite."""
        rows = [(1.0, x, 0.0, x) if math.isfinite(x) else (0.0, 0.0, 0.0, -math.inf) for x in values.values()]
        moments = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)
        return {name: Stat(row) for name, row in zip(values, moments.unbind(), strict=True)}

    @staticmethod
    def single(value: float | Tensor) -> "Stat":
        """Return the statistics of a single number."""
        exact = torch.as_tensor(value, dtype=torch.float64).detach()
        return Stat(torch.stack([torch.ones_like(exact), exact, torch.zeros_like(exact), exact]))

    def maximum(self) -> "Stat":
        """Return the same population, logged as its maximum."""
        return Stat(self.moments, "max")

    def std(self) -> "Stat":
        """Return the same population, logged as its unbiased standard deviation."""
        return Stat(self.moments, "std")

    def sum(self) -> "Stat":
        """Return the same population, logged as its sum."""
        return Stat(self.moments, "sum")

    def ess(self) -> "Stat":
        """Return the same population of weights, logged as the effective sample fraction (sum w)^2 / (n sum w^2)."""
        return Stat(self.moments, "ess")

    def value(self) -> float:
        """Return the number to log; NaN for an empty population."""
        return reduce_moments(self.moments.tolist(), self.reduction)


def stack_moments(stats: Sequence[Stat], device: torch.device | str) -> Float[Tensor, "K 4"]:
    """Stack the moments of statistics on one device, with one copy per source device."""
    devices, rows = {stat.moments.device for stat in stats}, dict[int, Tensor]()
    if len(devices) == 1:
        return to_device(torch.stack([stat.moments for stat in stats]), device)
    for source in devices:
        indices = [index for index, stat in enumerate(stats) if stat.moments.device == source]
        stacked = to_device(torch.stack([stats[index].moments for index in indices]), device)
        rows |= dict(zip(indices, stacked.unbind(), strict=True))
    return torch.stack([rows[index] for index in range(len(stats))])


def merge_moments(parts: Float[Tensor, "N *K 4"]) -> Float[Tensor, "*K 4"]:
    """Merge N disjoint populations into one, in the order of the parts.

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
"""Logged number of a non-empty population by reduction, from count, mean, squared deviations and maximum."""


def reduce_moments(moments: Sequence[float], reduction: StatReduction) -> float:
    """Return the reduction of a population's count, mean, squared deviations and maximum; NaN if it is empty."""
    return FIGURES[reduction](*moments) if moments[0] else math.nan


def disjoint(*parts: Mapping[str, Stat]) -> dict[str, Stat]:
    """Merge dicts of statistics.

    Raises:
        ValueError: If two parts have the same key.
    """
    joined: dict[str, Stat] = {}
    for part in parts:
        duplicates = joined.keys() & part.keys()
        if duplicates:
            raise ValueError(f"expected each metric from one place, got {sorted(duplicates)[0]} from two")
        joined |= part
    return joined
