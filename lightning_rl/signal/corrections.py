"""The pure mathematics of the corrections: importance weights and rejection rules between two policies."""

from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rl.signal.losses import policy_ratio
from lightning_rl.signal.masked import row_mean


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


def drifted_and_bad(
    drift: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    valid_tokens: Bool[Tensor, "B T"],
    *,
    delta: float,
) -> Bool[Tensor, " B"]:
    r"""Rows whose mean advantage is negative and whose mean drift exceeds ``delta``: one decision for a whole row.

    Args:
        drift: log-probability before minus log-probability now, shape [B, T].
        advantages: shape [B, T].
        valid_tokens: what the means run over, shape [B, T]; a row without any is not marked.
        delta: drift allowed, in nats per token.
    """
    return (row_mean(advantages, valid_tokens) < 0) & (row_mean(drift.detach(), valid_tokens) > delta)
