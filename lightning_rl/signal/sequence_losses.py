"""Losses that see a whole response at once, spread over its tokens. None is masked or averaged."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rl.signal.losses import check_same_shape, clipped_surrogate
from lightning_rl.signal.masked import masked_fill_invalid, row_mean
from lightning_rl.signal.ratios import LOG_RATIO_BOUND, policy_ratio, sequence_log_ratio


def gspo(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    valid_tokens: Bool[Tensor, "B T"],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    per_token: bool = False,
    log_ratio_bound: float = LOG_RATIO_BOUND,
) -> Float[Tensor, "B T"]:
    r"""The clipped surrogate with one ratio for a whole response, the geometric mean of those of its tokens.

    .. math:: s_b = \exp\Bigl(\frac{1}{|o_b|} \sum_t \log \frac{\pi_\theta(o_{b,t})}{\pi_{\text{old}}(o_{b,t})}\Bigr)

    With equal advantages along a row, both forms have the same value and, reduced, the same gradient.

    Source: Zheng et al. 2025 (GSPO), arXiv:2507.18071, eq. 5 and 7; the form per token: eq. 13 and 14.

    Args:
        logprobs: log-probability of each token, with gradient, shape [B, T].
        old_logprobs: the same before the update, shape [B, T].
        advantages: shape [B, T].
        valid_tokens: what the mean runs over, shape [B, T].
        clip_low: how far below 1 the ratio still has a gradient, in [0, 1].
        clip_high: how far above 1 it still has one, at least 0.
        per_token: give every token its own gradient, :math:`\operatorname{sg}[s_b]\, p_t / \operatorname{sg}[p_t]`, for
            advantages that differ along a row.
        log_ratio_bound: of the mean log-ratio on either side, above 0; infinite for none. Beyond it the gradient is 0.

    Raises:
        ValueError: if the tensors differ in shape or a bound is out of range.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = sequence_log_ratio(logprobs, old_logprobs, valid_tokens, geometric=True)[:, None]
    if per_token:
        own = masked_fill_invalid(logprobs, valid_tokens)
        log_ratio = log_ratio.detach() + (own - own.detach())
    log_ratio = log_ratio.expand_as(logprobs)
    unmoved = torch.zeros_like(log_ratio)
    return clipped_surrogate(
        log_ratio, unmoved, advantages, clip_low=clip_low, clip_high=clip_high, log_ratio_bound=log_ratio_bound
    )


def gmpo(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    valid_tokens: Bool[Tensor, "B T"],
    *,
    clip: float = 0.4,
) -> Float[Tensor, "B T"]:
    r"""The geometric mean of a response's ratios, each clipped as a logarithm, times its mean advantage.

    .. math:: \ell_{b,t} = -\bar A_b \exp\Bigl(\frac{1}{|o_b|} \sum_t
        \pm\min\bigl(\pm \log r_{b,t},\ \pm \operatorname{clip}(\log r_{b,t}, -c, c)\bigr)\Bigr)

    with the sign of the token's advantage. Every valid token of a row has the same value, so that ``sequence_mean``
    gives the published loss.

    Source: Zhao et al. 2025 (GMPO), arXiv:2507.20673, eq. 4.

    Args:
        logprobs: log-probability of each token, with gradient, shape [B, T].
        old_logprobs: the same before the update, shape [B, T].
        advantages: shape [B, T].
        valid_tokens: what the means run over, shape [B, T].
        clip: bound c of the log-ratio, at least 0.

    Raises:
        ValueError: if the tensors differ in shape or the bound is negative.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_log_clip(clip)
    log_ratio = logprobs - old_logprobs
    sign = advantages.sign()
    worse = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-clip, clip))
    mean = row_mean(worse, valid_tokens)
    ratio = policy_ratio(mean, torch.zeros_like(mean))
    return (-row_mean(advantages, valid_tokens) * ratio)[:, None].expand_as(logprobs)


def check_log_clip(clip: float) -> None:
    """Raises a ValueError if the bound of a log-ratio is negative."""
    if not clip >= 0:
        raise ValueError(f"expected clip >= 0, got {clip}")
