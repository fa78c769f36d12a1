"""Functions with corners, and the gradient that each has there in every version of torch.

At a corner a function has no derivative, and frameworks choose: torch 2.13 gives ``clamp`` a gradient of 1 at its
bounds, torch 2.15 of 0. Losses, loss terms and KL estimators use these functions instead, so that the gradient of a
value at its bound, such as a ratio of 1 in a clip without room, belongs to the formula.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor


def clamp(values: Float[Tensor, "..."], low: float = -math.inf, high: float = math.inf) -> Float[Tensor, "..."]:
    """Return values limited to a range: gradient 1 within the range and at its bounds, 0 beyond and for NaN."""
    return torch.where((values >= low) & (values <= high), values, values.detach().clamp(low, high))


def absolute_value(values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return absolute values; the gradient is the sign, 0 at 0."""
    return values * values.detach().sign()


def maximum(one: Float[Tensor, "..."], other: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return the larger value of two; each has half of the gradient where they are equal."""
    return torch.where(one > other, one, torch.where(one < other, other, one / 2 + other / 2))


def minimum(one: Float[Tensor, "..."], other: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return the smaller value of two; each has half of the gradient where they are equal."""
    return torch.where(one < other, one, torch.where(one > other, other, one / 2 + other / 2))
