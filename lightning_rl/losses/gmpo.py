"""GMPO: the geometric mean of a response's clipped ratios."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.arguments import check_numbers
from lightning_rl.corrections import LossView
from lightning_rl.losses.base import RatioLoss
from lightning_rl.signal.masked import row_mean
from lightning_rl.signal.ratios import policy_ratio


@dataclass(frozen=True, kw_only=True)
class GMPO(RatioLoss):
    r"""The geometric mean of a response's ratios, each clipped as a logarithm, times its mean advantage.

    .. math:: \ell_{b,t} = -\bar A_b \exp\Bigl(\frac{1}{|o_b|} \sum_t
        \pm\min\bigl(\pm \log r_{b,t},\ \pm \operatorname{clip}(\log r_{b,t}, -c_{low}, c_{high})\bigr)\Bigr)

    with the sign of the token's advantage. Every valid token of a row has the same value, so that ``sequence_mean``
    gives the published loss, and a weight of each token would only count with its mean: weigh with
    ``TruncatedIS("geometric")``, whose weight is a factor inside the geometric mean.

    Source: Zhao et al. 2025 (GMPO), arXiv:2507.20673, eq. 4.

    Args:
        clip_low: how far below 0 a log-ratio still has a gradient, at least 0.
        clip_high: how far above 0 it still has one, at least 0.

    Raises:
        ValueError: if a bound is negative.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self) -> None:
        """Checks the bounds."""
        check_numbers(at_least=0, clip_low=self.clip_low, clip_high=self.clip_high)

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        advantages, valid = view.require("advantages"), view.valid_tokens
        log_ratio, sign = view.logprobs - view.require("old_logprobs"), advantages.sign()
        worse = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-self.clip_low, self.clip_high))
        mean = row_mean(worse, valid)
        ratio = policy_ratio(mean, torch.zeros_like(mean), bound=self.log_ratio_bound)
        return (-row_mean(advantages, valid) * ratio)[:, None].expand_as(view.logprobs)
