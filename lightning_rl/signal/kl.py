r"""KL estimators per token, as functions of two log-probabilities.

With :math:`d = \log p - \log q` at a token sampled from :math:`p`:

=============  ====================  ==========================  =================================
name           value                 as a metric of KL(p || q)   expected gradient as a loss term
=============  ====================  ==========================  =================================
``k1``         :math:`d`             unbiased, high variance     zero
``abs``        :math:`|d|`           biased                      not of a divergence
``k2``         :math:`d^2/2`         biased, low variance        of the reverse KL(p || q)
``k3``         :math:`e^{-d}-1+d`    unbiased, low variance      of the *forward* KL(q || p)
``binary_kl``  :func:`binary_kl`     biased, a lower bound       not of a divergence; vanishes with p
=============  ====================  ==========================  =================================

No value is masked, averaged or clamped: a clamp would remove the gradient where the drift is large. Multiplied by
:func:`importance`, k1 and k3 keep their expected value and have the gradient of the reverse KL.

Source: Schulman 2020, "Approximating KL Divergence"; gradients: Tang and Munos 2025, arXiv:2506.09477.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rl.signal.importance_ratios import LOG_RATIO_BOUND, policy_ratio
from lightning_rl.signal.subgradients import absolute_value, clamp
from lightning_rl.utils.arguments import check_numbers

KLEstimator = Callable[[Tensor, Tensor], Tensor]

TANGENT_BEYOND = 20.0
TANGENT_SLOPE = math.exp(TANGENT_BEYOND)
SMALLEST = 1e-8  # lower bound of probabilities before the logarithm


def tangent_expm1(exponent: Float[Tensor, "..."], *, tangent: bool = True) -> Float[Tensor, "..."]:
    """Return ``exp`` minus 1 up to 20 and its tangent beyond, which cannot overflow and keeps a gradient.

    Args:
        exponent: Exponent, of any shape.
        tangent: False for ``expm1`` without the tangent.
    """
    if not tangent:
        return torch.expm1(exponent)
    bounded = torch.expm1(clamp(exponent, high=TANGENT_BEYOND))
    return torch.where(exponent > TANGENT_BEYOND, TANGENT_SLOPE * (exponent - TANGENT_BEYOND + 1) - 1, bounded)


def k1(logprobs: Float[Tensor, "..."], other: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r"""Return the log-ratio. As a loss term on samples of the policy, its expected gradient is zero.

    .. math::
        d = \log p - \log q
    """
    return logprobs - other


def absolute(logprobs: Float[Tensor, "..."], other: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r"""Return the absolute log-ratio.

    .. math::
        |d| = |\log p - \log q|
    """
    return absolute_value(logprobs - other)


def k2(logprobs: Float[Tensor, "..."], other: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r"""Return half the squared log-ratio, whose gradient is that of the reverse KL.

    .. math::
        \frac{d^2}{2} = \frac{1}{2} (\log p - \log q)^2
    """
    return 0.5 * (logprobs - other).square()


def k3(logprobs: Float[Tensor, "..."], other: Float[Tensor, "..."], *, tangent: bool = True) -> Float[Tensor, "..."]:
    r"""Return ``exp(-d) - 1 + d``, unbiased and never negative; beyond 20, the exponential continues as its tangent.

    .. math::
        e^{-d} - 1 + d, \qquad d = \log p - \log q

    Uses ``expm1``: in float32, ``exp(-d) - 1`` loses all digits and the sign of a gap below 3e-4.

    Args:
        logprobs: Log-probabilities under the policy that sampled.
        other: Log-probabilities under the other policy.
        tangent: False for the exponential without tangent, which overflows beyond a gap of 88.

    Example:
        >>> k3(torch.tensor([-1.0]), torch.tensor([-1.5]))
        tensor([0.1065])
    """
    gap = logprobs - other
    return tangent_expm1(-gap, tangent=tangent) + gap


def binary_kl(logprobs: Float[Tensor, "..."], other: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r"""Return the KL between two Bernoulli distributions, "this token" or "another".

    .. math:: p \log\frac{p}{q} + (1 - p) \log\frac{1 - p}{1 - q}

    Never negative, and at most the KL of the whole distributions. It measures a change of probability, so a rare token
    with a large ratio has a small value, which suits masks and trust regions. Its gradient is about p, so it does not
    restore tokens that the policy no longer samples.

    Probabilities of the token and of all others are at least 1e-8, so values are at most 18.5, with gradient 0 beyond.
    Both terms are computed as :math:`x (\log\frac{x}{y} + \frac{y}{x} - 1)`, which adds 0 to their sum and is never
    negative; :math:`1 - p` uses ``expm1``, so nothing cancels in float32.

    Source: Qi et al. 2026 (DPPO), arXiv:2602.04879, eq. 11 to 14, as a trust region.

    Args:
        logprobs: Log-probabilities under the first policy, at most 0.
        other: Log-probabilities under the second policy, at most 0.

    Example:
        >>> binary_kl(torch.tensor([0.5]).log(), torch.tensor([0.25]).log())
        tensor([0.1438])
    """
    least = math.log(SMALLEST)
    log_p, log_q = clamp(logprobs, low=least), clamp(other, low=least)
    rest_p, rest_q = (clamp(-torch.expm1(logprob), low=SMALLEST) for logprob in (log_p, log_q))
    return log_p.exp() * k3(log_p, log_q) + rest_p * k3(rest_p.log(), rest_q.log())


@dataclass(frozen=True, slots=True)
class Clamped:
    """Estimator with a clamped log-ratio or value. Beyond a bound its gradient is 0.

    Source: the clamps at 20 and 10 that verl, SkyRL, AReaL, NeMo-RL and OpenRLHF put around their estimators.

    Args:
        estimator: Estimator to clamp.
        value: Bound of the absolute estimate.
        log_ratio: Bound of the absolute log-ratio that the estimator gets.

    Raises:
        ValueError: Unless both bounds are positive.
    """

    estimator: KLEstimator
    value: float = 10.0
    log_ratio: float = math.inf

    def __post_init__(self) -> None:
        """Check the bounds."""
        check_numbers(above=0, value=self.value, log_ratio=self.log_ratio)

    def __call__(self, logprobs: Float[Tensor, "..."], other: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return the clamped estimate of each token."""
        gap = clamp(logprobs - other, -self.log_ratio, self.log_ratio)
        return clamp(self.estimator(gap, torch.zeros_like(gap)), -self.value, self.value)


def importance(
    logprobs: Float[Tensor, "..."], sampled: Float[Tensor, "..."] | None = None, *, bound: float = LOG_RATIO_BOUND
) -> Float[Tensor, "..."]:
    """Return the importance ratio, with gradient, that makes a k1 or k3 loss unbiased in value and gradient.

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, eq. 7; Tang and Munos 2025, arXiv:2506.09477.

    Args:
        logprobs: Log-probabilities under the policy being trained.
        sampled: Log-probabilities under the policy that sampled, without gradient; None for the policy being trained,
            with a ratio of 1 that carries the score-function gradient.
        bound: Bound of the absolute log-ratio, above 0; infinite for none.
    """
    return policy_ratio(logprobs, logprobs.detach() if sampled is None else sampled, bound=bound)


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3, "binary_kl": binary_kl}


def kl_estimator(estimator: KLEstimator | str) -> KLEstimator:
    """Return the estimator for an object, a function of (logprobs, other) or a registered name.

    Raises:
        ValueError: If the name is unknown.
    """
    if callable(estimator) and not isinstance(estimator, type):
        return estimator
    if estimator not in KL_ESTIMATORS:
        names = ", ".join(KL_ESTIMATORS)
        raise ValueError(f"expected a KL estimator out of {names}, an object or a function, got {estimator!r}")
    return KL_ESTIMATORS[estimator]
