"""ClippedSurrogate: PPO's clipped loss per token."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, Stat
from lightning_rl.losses.policy_loss import RatioLoss
from lightning_rl.signal.importance_ratios import check_distances
from lightning_rl.signal.subgradients import clamp, maximum, minimum
from lightning_rl.utils.arguments import check_numbers


@dataclass(frozen=True, kw_only=True)
class ClippedSurrogate(RatioLoss):
    r"""PPO's clipped objective per token, negated.

    .. math::
        \ell = \max\bigl(-r A,\ -\operatorname{clip}(r,\ 1 - \epsilon_{low},\ 1 + \epsilon_{high})\, A\bigr),
        \qquad r = \exp(\mathit{logprobs} - \mathit{old\_logprobs})

    With a dual clip :math:`c`, the loss of a token with negative advantage is at most :math:`-cA`. Logs the fractions
    of tokens without gradient because of the clip, not the dual clip, as ``policy/clip_fraction_low`` and
    ``policy/clip_fraction_high``.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; two bounds: Yu et al. 2025 (DAPO), arXiv:2503.14476; dual
    clip: Ye et al. 2020, arXiv:1912.09729.

    Args:
        clip_low: Distance of the lower bound from 1, in [0, 1].
        clip_high: Distance of the upper bound from 1, at least 0; above ``clip_low`` for DAPO's clip-higher.
        dual_clip: Upper bound on the ratio of tokens with negative advantage, above 1; None for no bound.

    Raises:
        ValueError: If a distance is out of range, or the distances are bounds, such as 0.8 and 1.2.

    Example:
        >>> ratio, advantages = torch.tensor([[1.8, 1.0]]), torch.ones(1, 2)
        >>> ClippedSurrogate().surrogate(ratio, advantages)  # clipped from 1.8 to 1.2
        tensor([[-1.2000, -1.0000]])
    """

    token_wise: ClassVar[bool] = True
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        check_clip(self.clip_low, self.clip_high)
        check_numbers(above=1, optional=True, dual_clip=self.dual_clip)

    def surrogate(self, ratio: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Return the loss of each token from its importance ratio."""
        loss = maximum(-ratio * advantages, -clamp(ratio, 1 - self.clip_low, 1 + self.clip_high) * advantages)
        if self.dual_clip is None:
            return loss
        return torch.where(advantages < 0, minimum(loss, -self.dual_clip * advantages), loss)

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        return self.surrogate(self.importance(view), view.require("advantages"))

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        ratio, advantages = self.importance(view).detach(), view.require("advantages")
        below, above = (ratio < 1 - self.clip_low) & (advantages < 0), (ratio > 1 + self.clip_high) & (advantages > 0)
        return Stat.many({"policy/clip_fraction_low": below, "policy/clip_fraction_high": above}, view.valid_tokens)


def check_clip(clip_low: float, clip_high: float) -> None:
    """Raise a ValueError unless ``0 <= clip_low <= 1`` and ``clip_high >= 0`` are distances from 1."""
    check_numbers(at_least=0, at_most=1, clip_low=clip_low)
    check_distances(clip_low=clip_low, clip_high=clip_high)
