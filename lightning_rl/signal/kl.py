r"""Estimators of a Kullback-Leibler divergence from single tokens, each of one log-probability against another.

With :math:`d = \log p - \log q` at a token sampled from :math:`p`:

=============  ====================  ==========================  =================================
name           value                 as a metric of KL(p || q)   expected gradient as a loss term
=============  ====================  ==========================  =================================
``k1``         :math:`d`             unbiased, high variance     zero: it trains nothing
``abs``        :math:`|d|`           biased                      of no divergence
``k2``         :math:`d^2/2`         biased, low variance        of the reverse KL(p || q)
``k3``         :math:`e^{-d}-1+d`    unbiased, low variance      of the *forward* KL(q || p)
``binary_kl``  :func:`binary_kl`     a lower bound, biased       of no divergence; fades as p falls
=============  ====================  ==========================  =================================

None is masked or averaged, and no value is clamped: a clamp kills the restoring force just where the drift is large.
Times :func:`importance`, k1 and k3 keep their expected value and get the gradient of the reverse KL.

Source: Schulman 2020, "Approximating KL Divergence"; gradients: Tang and Munos 2025, arXiv:2506.09477.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rl.arguments import check_numbers
from lightning_rl.signal.ratios import LOG_RATIO_BOUND, policy_ratio

KLEstimator = Callable[[Tensor, Tensor], Tensor]

TANGENT_BEYOND = 20.0
TANGENT_SLOPE = math.exp(TANGENT_BEYOND)
SMALLEST = 1e-8  # probability, whose logarithm is taken


def tangent_expm1(exponent: Float[Tensor, "..."], *, tangent: bool = True) -> Float[Tensor, "..."]:
    """``exp`` minus 1 up to 20 and its tangent line beyond, so that it cannot overflow and its slope never decreases.

    Without the rounding error of ``exp(x) - 1`` near 0; ``tangent=False`` for ``expm1`` itself.
    """
    if not tangent:
        return torch.expm1(exponent)
    bounded = torch.expm1(exponent.clamp(max=TANGENT_BEYOND))
    return torch.where(exponent > TANGENT_BEYOND, TANGENT_SLOPE * (exponent - TANGENT_BEYOND + 1) - 1, bounded)


def k1(logprobs: Float[Tensor, "..."], other: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r"""The plain log-ratio. As a loss term on samples of the policy its expected gradient is zero.

    .. math::
        d = \log p - \log q
    """
    return logprobs - other


def absolute(logprobs: Float[Tensor, "..."], other: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r"""The absolute log-ratio.

    .. math::
        |d| = |\log p - \log q|
    """
    return (logprobs - other).abs()


def k2(logprobs: Float[Tensor, "..."], other: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r"""Half the squared log-ratio. Its gradient is that of the reverse KL.

    .. math::
        \frac{d^2}{2} = \frac{1}{2} (\log p - \log q)^2
    """
    return 0.5 * (logprobs - other).square()


def k3(logprobs: Float[Tensor, "..."], other: Float[Tensor, "..."], *, tangent: bool = True) -> Float[Tensor, "..."]:
    r"""``exp(-d) - 1 + d``: unbiased and never negative; beyond a gap of 20 the exponential goes on as its tangent.

    .. math::
        e^{-d} - 1 + d, \qquad d = \log p - \log q

    Made with ``expm1``: in float32 ``exp(-d) - 1`` would have lost all of a gap below 3e-4, and its sign.

    Args:
        logprobs: of the policy that the tokens are from.
        other: of the policy that it is compared to.
        tangent: False for the exponential itself, which overflows beyond a gap of 88.

    Example:
        >>> k3(torch.tensor([-1.0]), torch.tensor([-1.5]))
        tensor([0.1065])
    """
    gap = logprobs - other
    return tangent_expm1(-gap, tangent=tangent) + gap


def binary_kl(logprobs: Float[Tensor, "..."], other: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r"""The KL between two Bernoulli distributions, "this token" or "another".

    .. math:: p \log\frac{p}{q} + (1 - p) \log\frac{1 - p}{1 - q}

    A divergence of its own at every token, never negative, and at most that of the whole distributions. It measures a
    change of probability, so that a rare token whose ratio is large counts for little: for masks and trust regions. Its
    gradient is about p, so that it does not pull back a token that the policy has given up.

    A probability below 1e-8, of the token or of all others together, counts as 1e-8: no value is above 18.5, and what
    lies beyond has no gradient. Each of the two parts is written as :math:`x (\log\frac{x}{y} + \frac{y}{x} - 1)`: that
    adds 0 to their sum and is never negative, and with :math:`1 - p` by ``expm1`` nothing cancels in float32.

    Source: Qi et al. 2026 (DPPO), arXiv:2602.04879, eq. 11 to 14, as a trust region.

    Args:
        logprobs: of the policy whose KL it is, at most 0.
        other: of the policy that it is compared to, at most 0.

    Example:
        >>> binary_kl(torch.tensor([0.5]).log(), torch.tensor([0.25]).log())
        tensor([0.1438])
    """
    least = math.log(SMALLEST)
    log_p, log_q = logprobs.clamp(min=least), other.clamp(min=least)
    rest_p, rest_q = (-torch.expm1(given).clamp(max=-SMALLEST) for given in (log_p, log_q))
    return log_p.exp() * k3(log_p, log_q) + rest_p * k3(rest_p.log(), rest_q.log())


@dataclass(frozen=True, slots=True)
class Clamped:
    """An estimator whose log-ratio, or value, is cut off. Beyond a bound its gradient is 0: nothing pulls back.

    Source: the clamps at 20 and 10 that verl, SkyRL, AReaL, NeMo-RL and OpenRLHF put around their estimators.

    Args:
        estimator: what is bounded.
        value: bound of the estimate on either side.
        log_ratio: bound of the log-ratio that the estimator sees, on either side.

    Raises:
        ValueError: unless both bounds are positive.
    """

    estimator: KLEstimator
    value: float = 10.0
    log_ratio: float = math.inf

    def __post_init__(self) -> None:
        """Checks the bounds."""
        check_numbers(above=0, value=self.value, log_ratio=self.log_ratio)

    def __call__(self, logprobs: Float[Tensor, "..."], other: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The bounded estimate of each token."""
        gap = (logprobs - other).clamp(-self.log_ratio, self.log_ratio)
        return self.estimator(gap, torch.zeros_like(gap)).clamp(-self.value, self.value)


def importance(
    logprobs: Float[Tensor, "..."], sampled: Float[Tensor, "..."] | None = None, *, bound: float = LOG_RATIO_BOUND
) -> Float[Tensor, "..."]:
    """The importance ratio, with gradient, that makes a k1 or k3 loss unbiased in value and gradient.

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, eq. 7; Tang and Munos 2025, arXiv:2506.09477.

    Args:
        logprobs: of the policy being trained.
        sampled: of the policy that sampled, without gradient; None takes the policy being trained for it, whose
            ratio is 1 and carries the score-function gradient alone.
        bound: of the log-ratio on either side, above 0; infinite for none.
    """
    return policy_ratio(logprobs, logprobs.detach() if sampled is None else sampled, bound=bound)


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3, "binary_kl": binary_kl}


def kl_estimator(estimator: KLEstimator | str) -> KLEstimator:
    """An estimator from an object, a function of (logprobs, other), or a known name.

    Raises:
        ValueError: if the name is unknown; the message lists the known ones.
    """
    if callable(estimator) and not isinstance(estimator, type):
        return estimator
    if estimator not in KL_ESTIMATORS:
        names = ", ".join(KL_ESTIMATORS)
        raise ValueError(f"expected a KL estimator out of {names}, an object or a function, got {estimator!r}")
    return KL_ESTIMATORS[estimator]
