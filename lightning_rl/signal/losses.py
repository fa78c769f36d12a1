"""Losses of single tokens. None is masked or averaged: :mod:`lightning_rl.signal.reductions` does both."""

import torch
from jaxtyping import Float
from torch import Tensor

LOG_RATIO_BOUND = 20.0


def check_same_shape(**tensors: Tensor) -> None:
    """Raises a ValueError that names every tensor with its shape unless all shapes are equal."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"expected tensors of one shape, got {shapes}")


def policy_ratio(logprobs: Float[Tensor, "*B"], old_logprobs: Float[Tensor, "*B"]) -> Float[Tensor, "*B"]:
    """``exp(logprobs - old_logprobs)``, the exponent clamped to +-20 so that it cannot overflow."""
    return torch.exp((logprobs - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def clipped_surrogate(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
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
    ratio = policy_ratio(logprobs, old_logprobs)
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


def value_loss(
    values: Float[Tensor, "B T"],
    old_values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    *,
    clip: float | None = 0.2,
) -> Float[Tensor, "B T"]:
    r"""Half the squared error of the critic at each token, the larger of plain and clipped.

    .. math:: \ell = \tfrac12 \max\bigl((V - R)^2,\ (V_{old} + \operatorname{clip}(V - V_{old}, \pm c) - R)^2\bigr)

    Source: Schulman et al. 2017, arXiv:1707.06347; clipping: the authors' code (openai/baselines, ppo2).

    Args:
        values: the critic's predictions, with gradient, shape [B, T].
        old_values: its predictions before the update, shape [B, T].
        returns: what it should have predicted, shape [B, T].
        clip: how far the prediction may move within a rollout; None for the plain squared error.

    Raises:
        ValueError: if the tensors differ in shape or ``clip`` is not positive.
    """
    check_same_shape(values=values, old_values=old_values, returns=returns)
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain
    if not clip > 0:
        raise ValueError(f"expected clip > 0 or None, got {clip}")
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain, (clipped - returns).square())
