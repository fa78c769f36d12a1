"""Losses of single tokens. None is masked or averaged: :mod:`lightning_rl.signal.reductions` does both."""

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rl.signal.ratios import LOG_RATIO_BOUND, policy_ratio

Divergence = Literal["tv", "kl"]


def check_same_shape(**tensors: Tensor) -> None:
    """Raises a ValueError that names every tensor with its shape unless all shapes are equal."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"expected tensors of one shape, got {shapes}")


def clipped_surrogate(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    log_ratio_bound: float = LOG_RATIO_BOUND,
) -> Float[Tensor, "B T"]:
    r"""PPO's clipped objective for each token, negated so that lower is better.

    .. math::
        \ell = \max\bigl(-r A,\ -\operatorname{clip}(r,\ 1 - \epsilon_{low},\ 1 + \epsilon_{high})\, A\bigr),
        \qquad r = \exp(\mathit{logprobs} - \mathit{old\_logprobs})

    With a dual clip :math:`c`, a token of negative advantage costs at most :math:`-cA`.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; two bounds: Yu et al. 2025 (DAPO), arXiv:2503.14476; dual
    clip: Ye et al. 2020, arXiv:1912.09729.

    Args:
        logprobs: log-probability of each sampled token under the policy being trained; the only term with a gradient.
        old_logprobs: the same under the policy that this optimisation phase started from.
        advantages: how much better than expected each token was.
        clip_low: how far below 1 the ratio still has a gradient, in [0, 1].
        clip_high: how far above 1 it still has one, at least 0. More than ``clip_low`` is DAPO's clip-higher.
        dual_clip: bound above 1 on the ratio of tokens with negative advantage; None for no bound.
        log_ratio_bound: of the log-ratio on either side, above 0; infinite for none. Beyond it the gradient is 0.

    Returns:
        The loss of each token, padding included, shape [B, T].

    Raises:
        ValueError: if the tensors differ in shape or a bound is out of range.

    Example:
        >>> old, new = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.5]]).log()
        >>> clipped_surrogate(new, old, torch.ones(1, 2))  # a ratio of 1.8 counts as 1.2
        tensor([[-1.2000, -1.0000]])
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_clip(clip_low, clip_high, dual_clip)
    ratio = policy_ratio(logprobs, old_logprobs, bound=log_ratio_bound)
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def check_clip(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    """Raises a ValueError unless the bounds of a clipped ratio make sense."""
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(f"expected 0 <= clip_low <= 1 and clip_high >= 0, got {clip_low} and {clip_high}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"expected dual_clip > 1 or None, got {dual_clip}")


def policy_gradient(logprobs: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    r"""The score-function loss :math:`-A \log p` of each token.

    Source: Williams 1992.
    """
    check_same_shape(logprobs=logprobs, advantages=advantages)
    return -advantages * logprobs


def cispo(
    logprobs: Float[Tensor, "B T"],
    anchor: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Float[Tensor, "B T"]:
    r"""The policy gradient, weighed with a clipped importance ratio, so that no token loses its gradient.

    .. math::
        \ell = -\operatorname{sg}\bigl[\operatorname{clip}(r,\ 1 - \epsilon_{low},\ 1 + \epsilon_{high})\bigr]\,
        A \log p

    Source: MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eq. 4.

    Args:
        logprobs: log-probability of each token, with gradient, shape [B, T].
        anchor: the same under the policy that the ratio is taken to, shape [B, T].
        advantages: shape [B, T].
        clip_low: how far below 1 the weight goes, in [0, 1]; 1 for no lower bound.
        clip_high: how far above 1 the weight goes, at least 0.

    Raises:
        ValueError: if the tensors differ in shape or a bound is out of range.
    """
    check_same_shape(logprobs=logprobs, anchor=anchor, advantages=advantages)
    check_clip(clip_low, clip_high, None)
    weight = policy_ratio(logprobs.detach(), anchor).clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs


def dppo(
    logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    divergence: Divergence = "tv",
    low: float = 0.2,
    high: float = 0.2,
    cap: float | None = None,
    log_ratio_bound: float = LOG_RATIO_BOUND,
) -> Float[Tensor, "B T"]:
    r"""The surrogate :math:`-\rho A` wherever the token has not left a trust region in the direction of its advantage.

    The region bounds the divergence between two Bernoulli distributions, "this token" or "another", of the policy being
    trained and the one that sampled: the total variation :math:`|p - q|` or the KL of q to p. A token that
    is left out has loss and gradient 0.

    Source: Qi et al. 2026 (DPPO), arXiv:2602.04879, eq. 11 to 14.

    Args:
        logprobs: log-probability of each token, with gradient, shape [B, T].
        rollout_logprobs: the same under the policy that sampled, shape [B, T].
        advantages: shape [B, T]; 0 counts as negative.
        divergence: ``"tv"`` or ``"kl"``.
        low: bound for tokens that a negative advantage made less likely.
        high: bound for tokens that a positive advantage made more likely.
        cap: None for :math:`-\rho A`; a number for the score-function form
            :math:`-\operatorname{sg}[\min(\rho, cap)] A \log p`, which has the same gradient below the cap.
        log_ratio_bound: of the log-ratio on either side, above 0; infinite for none. Beyond it the gradient is 0.

    Raises:
        ValueError: if the tensors differ in shape or an option is out of range.
    """
    check_same_shape(logprobs=logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages)
    check_trust_region(divergence, low, high, cap)
    ratio = policy_ratio(logprobs, rollout_logprobs, bound=log_ratio_bound)
    kept = ~outside_trust_region(logprobs, rollout_logprobs, advantages, divergence=divergence, low=low, high=high)
    if cap is None:
        return torch.where(kept, -ratio * advantages, 0.0)
    return torch.where(kept, -ratio.detach().clamp(max=cap) * advantages * logprobs, 0.0)


def outside_trust_region(
    logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    divergence: Divergence,
    low: float,
    high: float,
) -> Tensor:
    """The tokens that :func:`dppo` leaves out, shape [B, T] bool; arguments as there."""
    now, then = logprobs.detach().exp(), rollout_logprobs.exp()
    distance = (now - then).abs() if divergence == "tv" else _binary_kl(then, now)
    grown = (now > then) & (distance > high) & (advantages > 0)
    shrunk = (now < then) & (distance > low) & (advantages <= 0)
    return grown | shrunk


def _binary_kl(then: Tensor, now: Tensor) -> Tensor:
    tiny = 1e-8
    rest_then, rest_now = (1 - then).clamp(min=tiny), (1 - now).clamp(min=tiny)
    then, now = then.clamp(min=tiny), now.clamp(min=tiny)
    return then * (then / now).log() + rest_then * (rest_then / rest_now).log()


def check_trust_region(divergence: Divergence, low: float, high: float, cap: float | None) -> None:
    """Raises a ValueError unless the options of :func:`dppo` make sense."""
    if divergence not in get_args(Divergence):
        raise ValueError(f"expected divergence tv or kl, got {divergence!r}")
    if not (low >= 0 and high >= 0):
        raise ValueError(f"expected low >= 0 and high >= 0, got {low} and {high}")
    if cap is not None and not cap >= 1:
        raise ValueError(f"expected cap >= 1 or None, got {cap}")


def sapo(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Float[Tensor, "B T"]:
    r"""A soft gate on the ratio instead of a clip: :math:`-\tfrac{4}{\tau}\,\sigma(\tau (r - 1))\, A`.

    Near a ratio of 1 its gradient is that of :math:`-rA`; away from it the gradient fades.

    Source: Gao et al. 2025 (SAPO), arXiv:2511.20347, eq. 6.

    Args:
        logprobs: log-probability of each token, with gradient, shape [B, T].
        old_logprobs: the same before the update, shape [B, T].
        advantages: shape [B, T].
        tau_positive: temperature for positive advantages, above 0.
        tau_negative: temperature for the others; the larger, the sooner their gradient fades.

    Raises:
        ValueError: if the tensors differ in shape or a temperature is not positive.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_temperatures(tau_positive, tau_negative)
    tau = torch.where(advantages > 0, torch.full_like(advantages, tau_positive), tau_negative)
    gate = torch.sigmoid(tau * (policy_ratio(logprobs, old_logprobs) - 1))
    return -4 / tau * gate * advantages


def check_temperatures(tau_positive: float, tau_negative: float) -> None:
    """Raises a ValueError unless the temperatures of :func:`sapo` are positive."""
    if not (tau_positive > 0 and tau_negative > 0):
        raise ValueError(f"expected tau_positive > 0 and tau_negative > 0, got {tau_positive} and {tau_negative}")


def value_loss(
    values: Float[Tensor, "B T"],
    old_values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    *,
    clip: float | None = 0.2,
    huber: float = math.inf,
) -> Float[Tensor, "B T"]:
    r"""Half the squared error of the critic at each token, the larger of plain and clipped.

    .. math:: \ell = \tfrac12 \max\bigl((V - R)^2,\ (V_{old} + \operatorname{clip}(V - V_{old}, \pm c) - R)^2\bigr)

    Source: Schulman et al. 2017, arXiv:1707.06347; clipping: the authors' code (openai/baselines, ppo2).

    Args:
        values: the critic's predictions, with gradient, shape [B, T].
        old_values: its predictions before the update, shape [B, T].
        returns: what it should have predicted, shape [B, T].
        clip: how far the prediction may move within a rollout; None for the plain error.
        huber: error from which on the loss grows linearly instead of squared, above 0; infinite for never.

    Raises:
        ValueError: if the tensors differ in shape, or ``clip`` or ``huber`` is not positive.
    """
    check_same_shape(values=values, old_values=old_values, returns=returns)
    check_value_options(clip, huber)

    def error(predicted: Tensor) -> Tensor:
        gap = (predicted - returns).abs()
        bounded = gap.clamp(max=huber)
        return bounded * (gap - 0.5 * bounded)  # half the square up to the bound, its tangent beyond

    if clip is None:
        return error(values)
    return torch.maximum(error(values), error(old_values + (values - old_values).clamp(-clip, clip)))


def check_value_options(clip: float | None, huber: float) -> None:
    """Raises a ValueError unless the options of :func:`value_loss` are positive."""
    if clip is not None and not clip > 0:
        raise ValueError(f"expected clip > 0 or None, got {clip}")
    if not huber > 0:
        raise ValueError(f"expected huber > 0, got {huber}")
