"""Sum of rewards in which equal sums of different parts are equal numbers."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

DIGITS = 15  # of the 15 to 17 of float64


def rounded_sum(parts: Sequence[Float[Tensor, " B"]]) -> Float[Tensor, " B"]:
    """Return the sum in float64, rounded to 15 significant digits of the sum of absolute values.

    In binary arithmetic, 0.1 + 0.2 is not 0.3, and a normalization would scale this difference up to an advantage. A
    single part is not rounded. Parts in float32 count as the shortest decimal number that rounds to them.

    Args:
        parts: At least one tensor of shape [B].

    Example:
        >>> parts = [torch.tensor([0.1, 0.3, 1e8]), torch.tensor([0.2, 0.0, 0.25])]
        >>> rounded_sum(parts).tolist()
        [0.3, 0.3, 100000000.25]
    """
    exact = torch.stack([_in_float64(part) for part in parts])
    total = exact.sum(0)
    if len(parts) == 1:
        return total
    sizes = exact.abs().sum(0).tolist()
    rounded = [_round(*pair) for pair in zip(total.tolist(), sizes, strict=True)]
    return torch.tensor(rounded, dtype=torch.float64, device=total.device)


def _in_float64(part: Tensor) -> Tensor:
    if part.dtype != torch.float32:
        return part.double()
    return torch.tensor([float(str(value)) for value in part.cpu().numpy()], dtype=torch.float64, device=part.device)


def _round(value: float, size: float) -> float:
    if not (math.isfinite(size) and size):
        return value
    return round(value, DIGITS - 1 - math.floor(math.log10(size)))
