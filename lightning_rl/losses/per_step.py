"""Policy losses that choose tokens by a statistic of the whole optimizer step, so that they look at it beforehand.

Looking costs each of them one more forward pass over the step, without gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, Stat
from lightning_rl.losses.base import OldRatioLoss
from lightning_rl.losses.per_token import ClippedSurrogate
from lightning_rl.signal.masked import GlobalSum
from lightning_rl.signal.ratios import policy_ratio
from lightning_rl.signal.selection import GlobalConcat, covariances, largest, shuffled_keys, smallest_with_mean_below


def _covariances(views: Sequence[LossView], global_sum: GlobalSum) -> list[Tensor]:
    advantages = [view.required("advantages") for view in views]
    return covariances([view.logprobs for view in views], advantages, [view.valid_tokens for view in views], global_sum)


def _tokens(views: Sequence[LossView], global_sum: GlobalSum) -> int:
    return int(global_sum(torch.stack([view.valid_tokens.sum() for view in views]).sum()))


def _chosen(view: LossView) -> Tensor:
    if view.prepared is None:
        raise ValueError("expected the tokens that prepare chose, got none: call prepare with every view of the step")
    return view.prepared


@dataclass(frozen=True, kw_only=True)
class ClipCov(ClippedSurrogate):
    """The clipped surrogate without a few of the tokens whose covariance is high, which drive entropy down.

    The tokens are drawn among those whose covariance lies within the bounds and that no clip holds back, by a number
    that depends on the sample and the position alone. Logs ``policy/chosen``, their share.

    Source: Cui et al. 2025, arXiv:2505.22617, section 4.2.

    Args:
        fraction: share of the step's tokens that are left out at most, in [0, 1]; at least one token.
        cov_low: lower bound of the covariance.
        cov_high: upper bound of the covariance.

    Raises:
        ValueError: if an option is out of range.
    """

    fraction: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0

    def __post_init__(self) -> None:
        """Checks the bounds."""
        super().__post_init__()
        if not (0 <= self.fraction <= 1 and self.cov_low < self.cov_high):
            got = f"fraction={self.fraction}, cov_low={self.cov_low}, cov_high={self.cov_high}"
            raise ValueError(f"expected fraction in [0, 1] and cov_low < cov_high, got {got}")

    @override
    def prepare(
        self, views: Sequence[LossView], global_sum: GlobalSum, global_concat: GlobalConcat
    ) -> Sequence[Tensor]:
        number = max(int(self.fraction * _tokens(views, global_sum)), 1) if self.fraction else 0
        candidates = [
            view.valid_tokens & (cov > self.cov_low) & (cov < self.cov_high) & ~self._held_back(view)
            for view, cov in zip(views, _covariances(views, global_sum), strict=True)
        ]
        keys = [shuffled_keys(view.sample_ids, view.width) for view in views]
        return largest(keys, candidates, number, global_concat)

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        return torch.where(_chosen(view), 0.0, super().__call__(view))

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        return {**super().metrics(view), "policy/chosen": Stat.of(_chosen(view), view.valid_tokens)}

    def _held_back(self, view: LossView) -> Tensor:
        ratio, advantages = policy_ratio(view.logprobs, view.required("old_logprobs")), view.required("advantages")
        return -ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages > -ratio * advantages


@dataclass(frozen=True, kw_only=True)
class KLCov(OldRatioLoss):
    """The unclipped surrogate, with a penalty on the drift of the tokens whose covariance is highest.

    Logs ``policy/chosen``, the share of penalised tokens.

    Source: Cui et al. 2025, arXiv:2505.22617, section 4.3.

    Args:
        fraction: share of the step's tokens that are penalised, in [0, 1]; at least one token. None is where all
            advantages are 0, because then no covariance is the highest.
        coef: what the absolute log-ratio is multiplied with.

    Raises:
        ValueError: if an option is out of range.
    """

    fraction: float = 2e-4
    coef: float = 1.0

    def __post_init__(self) -> None:
        """Checks the bounds."""
        if not (0 <= self.fraction <= 1 and self.coef >= 0):
            raise ValueError(f"expected fraction in [0, 1] and coef >= 0, got {self.fraction} and {self.coef}")

    @override
    def prepare(
        self, views: Sequence[LossView], global_sum: GlobalSum, global_concat: GlobalConcat
    ) -> Sequence[Tensor]:
        number = max(int(self.fraction * _tokens(views, global_sum)), 1) if self.fraction else 0
        scores = _covariances(views, global_sum)
        candidates = [view.valid_tokens & (cov != 0) for view, cov in zip(views, scores, strict=True)]
        return largest(scores, candidates, number, global_concat)

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        old, advantages = view.required("old_logprobs"), view.required("advantages")
        surrogate = -policy_ratio(view.logprobs, old) * advantages
        return surrogate + torch.where(_chosen(view), self.coef * (view.logprobs - old).abs(), 0.0)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        return {"policy/chosen": Stat.of(_chosen(view), view.valid_tokens)}


@dataclass(frozen=True, kw_only=True)
class M2PO(ClippedSurrogate):
    """The clipped surrogate on tokens that keep the second moment of the engine's log-ratio small.

    The tokens with the largest squared log-ratio of old to rollout policy are left out until the mean over the rest is
    below the threshold; they stay in the denominator. Logs ``policy/kept``, the share of the others.

    Source: Zheng et al. 2025, arXiv:2510.01161.

    Args:
        threshold: bound of the mean squared log-ratio, above 0.

    Raises:
        ValueError: if an option is out of range.
    """

    reads = ("old_logprobs", "rollout_logprobs")

    threshold: float = 0.04

    def __post_init__(self) -> None:
        """Checks the bounds."""
        super().__post_init__()
        if not self.threshold > 0:
            raise ValueError(f"expected threshold > 0, got {self.threshold}")

    @override
    def prepare(
        self, views: Sequence[LossView], global_sum: GlobalSum, global_concat: GlobalConcat
    ) -> Sequence[Tensor]:
        squares = [(view.required("old_logprobs") - view.required("rollout_logprobs")).square() for view in views]
        return smallest_with_mean_below(squares, [view.valid_tokens for view in views], self.threshold, global_concat)

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        return torch.where(_chosen(view), super().__call__(view), 0.0)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        return {**super().metrics(view), "policy/kept": Stat.of(_chosen(view), view.valid_tokens)}
