"""The pure mathematics of the corrections: importance weights and rejection rules between two policies."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rl.signal.masked import row_mean
from lightning_rl.signal.ratios import policy_ratio


def check_band(low: float, high: float) -> None:
    """Raises a ValueError unless ``low`` and ``high`` bound ratios around 1."""
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"expected 0 <= low <= 1 <= high, got {low} and {high}")


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


def overlong_penalty(lengths: Int[Tensor, " B"], *, longest: int, cache: int) -> Float[Tensor, " B"]:
    r"""DAPO's soft punishment: 0 up to ``longest - cache`` tokens, then linear, -1 beyond ``longest``.

    .. math:: p(L) = \operatorname{clip}\Bigl(\frac{M - C - L}{C},\ -1,\ 0\Bigr)

    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13.

    Args:
        lengths: tokens of each response, shape [B].
        longest: the maximum M.
        cache: the interval C below it, above 0.

    Example:
        >>> import torch
        >>> overlong_penalty(torch.tensor([60, 90, 100, 120]), longest=100, cache=20)
        tensor([ 0.0000, -0.5000, -1.0000, -1.0000])
    """
    return ((longest - cache - lengths) / cache).clamp(-1.0, 0.0)


def adapted_coefficient(coef: float, measured: float, *, target: float, number: int, horizon: int) -> float:
    r"""A coefficient that moves towards holding a KL at its target, by at most a fifth for each ``horizon`` of samples.

    .. math:: \beta \leftarrow \beta\,\bigl(1 + \operatorname{clip}(KL / target - 1,\ \pm 0.2)\, n / horizon\bigr)

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.

    Args:
        coef: the present coefficient.
        measured: the KL found, in nats.
        target: the KL wanted, in nats, above 0.
        number: how many samples it was measured on.
        horizon: how many samples a change by a fifth takes, above 0.

    Example:
        >>> adapted_coefficient(0.5, 0.3, target=0.1, number=50, horizon=100)  # 10 % more
        0.55
    """
    error = min(max(measured / target - 1, -0.2), 0.2)
    return max(coef * (1 + error * number / horizon), 0.0)
