"""Policy losses with one importance ratio for a whole response."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, Stat
from lightning_rl.losses.base import OldRatioLoss, clip_metrics
from lightning_rl.signal.losses import check_clip
from lightning_rl.signal.ratios import sequence_ratio
from lightning_rl.signal.sequence_losses import check_log_clip, gmpo, gspo


@dataclass(frozen=True, kw_only=True)
class GSPO(OldRatioLoss):
    """The clipped surrogate with one ratio for a whole response; logs the shares of tokens that it clips.

    Source: Zheng et al. 2025, arXiv:2507.18071.

    Args:
        clip_low: how far below 1 the ratio still has a gradient, in [0, 1].
        clip_high: how far above 1 it still has one, at least 0.
        per_token: give every token its own gradient, for advantages that differ along a row.

    Raises:
        ValueError: if a bound is out of range.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    per_token: bool = False

    def __post_init__(self) -> None:
        """Checks the bounds."""
        check_clip(self.clip_low, self.clip_high, None)

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        return gspo(
            view.logprobs,
            view.required("old_logprobs"),
            view.required("advantages"),
            view.valid_tokens,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            per_token=self.per_token,
        )

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        ratio = sequence_ratio(view.logprobs, view.required("old_logprobs"), view.valid_tokens, geometric=True)
        return clip_metrics(ratio[:, None].expand_as(view.logprobs), view, self.clip_low, self.clip_high)


@dataclass(frozen=True, kw_only=True)
class GMPO(OldRatioLoss):
    """The geometric mean of a response's ratios, each clipped as a logarithm; meant for ``sequence_mean``.

    Source: Zhao et al. 2025, arXiv:2507.20673.

    Args:
        clip: bound of the log-ratio, at least 0.

    Raises:
        ValueError: if the bound is negative.
    """

    clip: float = 0.4

    def __post_init__(self) -> None:
        """Checks the bound."""
        check_log_clip(self.clip)

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        old, advantages = view.required("old_logprobs"), view.required("advantages")
        return gmpo(view.logprobs, old, advantages, view.valid_tokens, clip=self.clip)
