"""Importance ratios between two policies, of a token and of a whole row.

One rule for extreme log-ratios, everywhere: the exponent of a ratio is clamped to +-20 just before ``exp``, whatever it
is the exponent of. Sums and means of a row are of the log-ratios as they are, never of clamped ones. Between -20 and 20
nothing changes; beyond, a ratio is e^20 or e^-20 and its gradient 0. So caps and clips between e^-20 and e^20 do what
they would on the exact number, and those beyond never bind. Bands of ratios, as masks have them, are compared as
logarithms and decide on the exact number wherever they lie, see :func:`within_band`. Estimators of a KL have another
rule, because their gradient has to pull back from any distance: see :func:`lightning_rl.signal.kl.tangent_expm1`.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rl.arguments import check_numbers
from lightning_rl.signal.masked import masked_fill_invalid, row_mean

LOG_RATIO_BOUND = 20.0


def policy_ratio(
    logprobs: Float[Tensor, "*B"], old_logprobs: Float[Tensor, "*B"], *, bound: float = LOG_RATIO_BOUND
) -> Float[Tensor, "*B"]:
    """``exp(logprobs - old_logprobs)``, the exponent clamped to +-``bound`` so that it cannot overflow."""
    return torch.exp((logprobs - old_logprobs).clamp(-bound, bound))


def clipped_weight(
    numerator: Float[Tensor, "B T"], denominator: Float[Tensor, "B T"], *, minimum: float, maximum: float
) -> Float[Tensor, "B T"]:
    r"""The importance weight :math:`\operatorname{clip}(\exp(a - b), \min, \max)`, without gradient.

    Args:
        numerator: log-probabilities of the policy that the samples should come from, shape [B, T].
        denominator: log-probabilities of the policy that they do come from, shape [B, T].
        minimum: lower bound of the weight.
        maximum: upper bound of the weight.
    """
    return policy_ratio(numerator.detach(), denominator.detach()).clamp(minimum, maximum)


def within_band(log_ratio: Float[Tensor, "*B"], low: float, high: float) -> Bool[Tensor, "*B"]:
    """Whether ratios lie within bounds, both included, by their logarithms, however large; NaN does not."""
    least, most = (-math.inf if bound == 0 else math.log(bound) for bound in (low, high))
    return (log_ratio >= least) & (log_ratio <= most)


def check_band(low: float, high: float) -> None:
    """Raises a ValueError unless ``low`` and ``high`` bound ratios around 1."""
    check_numbers(at_least=0, at_most=1, low=low)
    check_numbers(at_least=1, high=high)


def sequence_log_ratio(
    numerator: Float[Tensor, "B T"],
    denominator: Float[Tensor, "B T"],
    valid_tokens: Bool[Tensor, "B T"],
    *,
    geometric: bool,
) -> Float[Tensor, " B"]:
    """Sum, or mean if ``geometric``, of the log-ratios over the valid tokens of each row; 0 for a row without any."""
    gap = masked_fill_invalid(numerator - denominator, valid_tokens)
    return row_mean(gap, valid_tokens) if geometric else gap.sum(-1)


def sequence_ratio(
    numerator: Float[Tensor, "B T"],
    denominator: Float[Tensor, "B T"],
    valid_tokens: Bool[Tensor, "B T"],
    *,
    geometric: bool,
) -> Float[Tensor, " B"]:
    r"""The importance ratio of a whole row, without gradient: :math:`\exp` of the sum or of the mean of the log-ratios.

    The exponent is clamped to +-20. The product grows with the length of the row; the geometric mean does not.

    Args:
        numerator: log-probabilities of the policy that the samples should come from, shape [B, T].
        denominator: log-probabilities of the policy that they do come from, shape [B, T].
        valid_tokens: what sum and mean run over, shape [B, T]; a row without any has ratio 1.
        geometric: the mean instead of the sum.
    """
    exponent = sequence_log_ratio(numerator.detach(), denominator.detach(), valid_tokens, geometric=geometric)
    return policy_ratio(exponent, torch.zeros_like(exponent))
