"""Importance ratios between two policies, per token and per row.

The exponent of every ratio is clamped to +-20 before ``exp``; beyond, the gradient is 0. Sums and means over a row use
unclamped log-ratios. Bounds on ratios between e^-20 and e^20 act as on the exact ratio. :func:`within_band` compares
exact log-ratios. KL estimators use :func:`lightning_rl.signal.kl.tangent_expm1` instead, which keeps a gradient at any
distance.
"""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rl.signal.masked import masked_fill_invalid, row_mean
from lightning_rl.signal.subgradients import clamp
from lightning_rl.utils.arguments import check_numbers

LOG_RATIO_BOUND = 20.0


def policy_ratio(
    logprobs: Float[Tensor, "*B"], old_logprobs: Float[Tensor, "*B"], *, bound: float = LOG_RATIO_BOUND
) -> Float[Tensor, "*B"]:
    """Return ``exp(logprobs - old_logprobs)``, with the exponent clamped to +-``bound`` to avoid overflow."""
    return torch.exp(clamp(logprobs - old_logprobs, -bound, bound))


def clipped_weight(
    numerator: Float[Tensor, "B T"], denominator: Float[Tensor, "B T"], *, minimum: float, maximum: float
) -> Float[Tensor, "B T"]:
    r"""Return the importance weight :math:`\operatorname{clip}(\exp(a - b), \min, \max)`, without gradient.

    Args:
        numerator: Log-probabilities under the target policy, shape [B, T].
        denominator: Log-probabilities under the policy that sampled, shape [B, T].
        minimum: Lower bound of the weight.
        maximum: Upper bound of the weight.
    """
    return policy_ratio(numerator.detach(), denominator.detach()).clamp(minimum, maximum)


def within_band(log_ratio: Float[Tensor, "*B"], low: float, high: float) -> Bool[Tensor, "*B"]:
    """Return a mask of ratios within bounds, both included, from exact log-ratios; False for NaN."""
    least, most = (-math.inf if bound == 0 else math.log(bound) for bound in (low, high))
    return (log_ratio >= least) & (log_ratio <= most)


def check_band(low: float, high: float) -> None:
    """Raise a ValueError unless ``0 <= low <= 1 <= high``."""
    check_numbers(at_least=0, at_most=1, low=low)
    check_numbers(at_least=1, high=high)


def check_distances(*, of_log_ratio: bool = False, **distances: Any) -> None:
    """Raise a ValueError unless a lower and an upper distance are at least 0, and are no bounds of the ratio itself.

    As distances, bounds such as 0.8 and 1.2 would allow ratios from 0.2 to 2.2. No distances that are refused allow
    ratios from 1 / c to c.

    Args:
        of_log_ratio: True for distances of the log-ratio from 0, False for distances of the ratio from 1.
        distances: Lower and upper distance by name.
    """
    check_numbers(at_least=0, **distances)
    low, high = distances.values()
    if 0.6 <= low < 1 < high < 1.5:
        right = (-math.log(low), math.log(high)) if of_log_ratio else (1 - low, high - 1)
        cure = ", ".join(f"{name}={number:.3g}" for name, number in zip(distances, right, strict=True))
        raise ValueError(
            f"expected {' and '.join(distances)} to be distances, got {low} and {high}, which are bounds of the ratio: "
            f"pass {cure}"
        )


def sequence_log_ratio(
    numerator: Float[Tensor, "B T"],
    denominator: Float[Tensor, "B T"],
    valid_tokens: Bool[Tensor, "B T"],
    *,
    geometric: bool,
) -> Float[Tensor, " B"]:
    """Return the sum, or mean if ``geometric``, of log-ratios over the valid tokens of each row; 0 for an empty row."""
    gap = masked_fill_invalid(numerator - denominator, valid_tokens)
    return row_mean(gap, valid_tokens) if geometric else gap.sum(-1)


def sequence_ratio(
    numerator: Float[Tensor, "B T"],
    denominator: Float[Tensor, "B T"],
    valid_tokens: Bool[Tensor, "B T"],
    *,
    geometric: bool,
) -> Float[Tensor, " B"]:
    r"""Return the importance ratio of each row, without gradient: :math:`\exp` of the sum or mean of log-ratios.

    The exponent is clamped to +-20. The product grows with the length of the row; the geometric mean does not.

    Args:
        numerator: Log-probabilities under the target policy, shape [B, T].
        denominator: Log-probabilities under the policy that sampled, shape [B, T].
        valid_tokens: Mask of the sum or mean, shape [B, T]; an empty row has ratio 1.
        geometric: Use the mean instead of the sum.
    """
    exponent = sequence_log_ratio(numerator.detach(), denominator.detach(), valid_tokens, geometric=geometric)
    return policy_ratio(exponent, torch.zeros_like(exponent))
