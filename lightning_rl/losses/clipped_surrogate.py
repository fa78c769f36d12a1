"""ClippedSurrogate: PPO's loss of single tokens."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.arguments import check_numbers
from lightning_rl.corrections import LossView, Stat
from lightning_rl.losses.base import RatioLoss


@dataclass(frozen=True, kw_only=True)
class ClippedSurrogate(RatioLoss):
    r"""PPO's clipped objective for each token, negated so that lower is better.

    .. math::
        \ell = \max\bigl(-r A,\ -\operatorname{clip}(r,\ 1 - \epsilon_{low},\ 1 + \epsilon_{high})\, A\bigr),
        \qquad r = \exp(\mathit{logprobs} - \mathit{old\_logprobs})

    With a dual clip :math:`c`, a token of negative advantage costs at most :math:`-cA`. Logs ``policy/clip_low`` and
    ``policy/clip_high``, the shares of tokens whose gradient a bound took away.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; two bounds: Yu et al. 2025 (DAPO), arXiv:2503.14476; dual
    clip: Ye et al. 2020, arXiv:1912.09729.

    Args:
        clip_low: how far below 1 the ratio still has a gradient, in [0, 1].
        clip_high: how far above 1 it still has one, at least 0; more than ``clip_low`` is DAPO's clip-higher.
        dual_clip: bound above 1 on the ratio of tokens with negative advantage; None for no bound.

    Raises:
        ValueError: if a bound is out of range.

    Example:
        >>> ratio, advantages = torch.tensor([[1.8, 1.0]]), torch.ones(1, 2)
        >>> ClippedSurrogate().surrogate(ratio, advantages)  # a ratio of 1.8 counts as 1.2
        tensor([[-1.2000, -1.0000]])
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        """Checks the bounds."""
        check_clip(self.clip_low, self.clip_high)
        check_numbers(above=1, optional=True, dual_clip=self.dual_clip)

    def surrogate(self, ratio: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """The loss of each token from its importance ratio."""
        loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages)
        if self.dual_clip is None:
            return loss
        return torch.where(advantages < 0, torch.minimum(loss, -self.dual_clip * advantages), loss)

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        return self.surrogate(self.importance(view), view.require("advantages"))

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        ratio, advantages = self.importance(view).detach(), view.require("advantages")
        below, above = (ratio < 1 - self.clip_low) & (advantages < 0), (ratio > 1 + self.clip_high) & (advantages > 0)
        return Stat.many({"policy/clip_low": below, "policy/clip_high": above}, view.valid_tokens)


def check_clip(clip_low: float, clip_high: float) -> None:
    """Raises a ValueError unless the bounds of a clipped ratio make sense."""
    check_numbers(at_least=0, at_most=1, clip_low=clip_low)
    check_numbers(at_least=0, clip_high=clip_high)
