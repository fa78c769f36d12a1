"""Clip-Cov and KL-Cov: losses for tokens with high covariance of log-probability and advantage."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, Stat
from lightning_rl.losses.clipped_surrogate import ClippedSurrogate
from lightning_rl.losses.policy_loss import RatioLoss, prepared_tokens
from lightning_rl.signal.masked import GlobalSum
from lightning_rl.signal.selection import GlobalConcat, covariances, largest, shuffled_keys
from lightning_rl.signal.subgradients import absolute_value
from lightning_rl.utils.arguments import check_numbers


@dataclass(frozen=True, kw_only=True)
class ClipCov(ClippedSurrogate):
    r"""Clipped surrogate that masks a few tokens of high covariance, which reduce entropy.

    .. math::
        \ell = \ell_{\text{clip}}\,[(b, t) \notin \mathcal{C}], \qquad
        \mathcal{C} \subset \{(b, t) : c_{low} < (\log p - \overline{\log p})(A - \bar A) < c_{high}\}

    The tokens are sampled from those that are not clipped and whose covariance is within the bounds. The choice depends
    only on sample and position. Logs their fraction as ``policy/chosen``.

    Source: Cui et al. 2025, arXiv:2505.22617, section 4.2.

    Args:
        fraction: Largest fraction of the step's tokens to mask, in [0, 1]; at least one token.
        cov_low: Lower bound of the covariance.
        cov_high: Upper bound of the covariance.

    Raises:
        ValueError: If an option is out of range.
    """

    fraction: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_numbers(at_least=0, at_most=1, fraction=self.fraction)
        check_numbers(cov_low=self.cov_low, cov_high=self.cov_high)
        if not self.cov_low < self.cov_high:
            raise ValueError(f"expected cov_low < cov_high, got {self.cov_low} and {self.cov_high}")

    @override
    def prepare(
        self, views: Sequence[LossView], global_sum: GlobalSum, global_concat: GlobalConcat
    ) -> Sequence[Tensor]:
        candidates = [
            view.valid_tokens & (cov > self.cov_low) & (cov < self.cov_high) & ~self._clip_binds(view)
            for view, cov in zip(views, _covariances(views, global_sum), strict=True)
        ]
        keys = [shuffled_keys(view.sample_ids, view.width) for view in views]
        return largest(keys, candidates, _number(self.fraction, views, global_sum), global_concat)

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        return torch.where(prepared_tokens(view), 0.0, super().__call__(view))

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        return {**super().metrics(view), "policy/chosen": Stat.of(prepared_tokens(view), view.valid_tokens)}

    def _clip_binds(self, view: LossView) -> Tensor:
        ratio, advantages = self.importance(view), view.require("advantages")
        return -ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages > -ratio * advantages


@dataclass(frozen=True, kw_only=True)
class KLCov(RatioLoss):
    r"""Unclipped surrogate that penalizes the drift of the tokens with the highest covariance.

    .. math::
        \ell = -r A + \beta\,\bigl|\log p - \log p_{\text{old}}\bigr|\,[(b, t) \in \mathcal{C}], \qquad
        \mathcal{C} = \text{the largest}\ (\log p - \overline{\log p})(A - \bar A)

    Logs the fraction of penalized tokens as ``policy/chosen``.

    Source: Cui et al. 2025, arXiv:2505.22617, section 4.3.

    Args:
        fraction: Fraction of the step's tokens to penalize, in [0, 1]; at least one token, or none if all advantages
            are 0.
        coef: Coefficient of the absolute log-ratio.

    Raises:
        ValueError: If an option is out of range.
    """

    fraction: float = 2e-4
    coef: float = 1.0

    def __post_init__(self) -> None:
        """Check the options."""
        check_numbers(at_least=0, at_most=1, fraction=self.fraction)
        check_numbers(at_least=0, finite=True, coef=self.coef)

    @override
    def prepare(
        self, views: Sequence[LossView], global_sum: GlobalSum, global_concat: GlobalConcat
    ) -> Sequence[Tensor]:
        number, scores = _number(self.fraction, views, global_sum), _covariances(views, global_sum)
        candidates = [view.valid_tokens & (cov != 0) for view, cov in zip(views, scores, strict=True)]
        return largest(scores, candidates, number, global_concat)

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        surrogate = -self.importance(view) * view.require("advantages")
        drift = absolute_value(view.logprobs - view.require("old_logprobs"))
        return surrogate + torch.where(prepared_tokens(view), self.coef * drift, 0.0)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        return {"policy/chosen": Stat.of(prepared_tokens(view), view.valid_tokens)}


def _covariances(views: Sequence[LossView], global_sum: GlobalSum) -> list[Tensor]:
    advantages = [view.require("advantages") for view in views]
    return covariances([view.logprobs for view in views], advantages, [view.valid_tokens for view in views], global_sum)


def _number(fraction: float, views: Sequence[LossView], global_sum: GlobalSum) -> int:
    if not fraction:
        return 0
    tokens = global_sum(torch.stack([view.valid_tokens.sum() for view in views]).sum())
    return max(int(fraction * int(tokens)), 1)
