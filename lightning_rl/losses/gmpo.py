"""GMPO: geometric mean of the clipped ratios of a response."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView
from lightning_rl.losses.policy_loss import RatioLoss
from lightning_rl.signal.importance_ratios import check_distances, policy_ratio
from lightning_rl.signal.masked import row_mean
from lightning_rl.signal.subgradients import clamp, minimum


@dataclass(frozen=True, kw_only=True)
class GMPO(RatioLoss):
    r"""Geometric mean of a response's ratios, clipped as log-ratios, times the mean advantage.

    .. math:: \ell_{b,t} = -\bar A_b \exp\Bigl(\frac{1}{|o_b|} \sum_t
        \pm\min\bigl(\pm \log r_{b,t},\ \pm \operatorname{clip}(\log r_{b,t}, -c_{low}, c_{high})\bigr)\Bigr)

    with the sign of the token's advantage. Every valid token of a row has the same value, so ``sequence_mean`` gives
    the published loss. A weight per token would count only with its mean: use ``TruncatedIS("geometric")`` instead.

    Source: Zhao et al. 2025 (GMPO), arXiv:2507.20673, eq. 4.

    Args:
        clip_low: Distance of the lower bound of the log-ratio from 0, at least 0.
        clip_high: Distance of the upper bound of the log-ratio from 0, at least 0.

    Raises:
        ValueError: If a distance is negative, or the two are bounds of the ratio, such as 0.67 and 1.49.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self) -> None:
        """Check the options."""
        check_distances(clip_low=self.clip_low, clip_high=self.clip_high, of_log_ratio=True)

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        advantages, valid = view.require("advantages"), view.valid_tokens
        log_ratio, sign = view.logprobs - view.require("old_logprobs"), advantages.sign()
        clipped = sign * minimum(sign * log_ratio, sign * clamp(log_ratio, -self.clip_low, self.clip_high))
        mean = row_mean(clipped, valid)
        ratio = policy_ratio(mean, torch.zeros_like(mean), bound=self.log_ratio_bound)
        return (-row_mean(advantages, valid) * ratio)[:, None].expand_as(view.logprobs)
