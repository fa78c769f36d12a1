"""CISPO: a clipped weight instead of a clipped objective."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.arguments import check_choices
from lightning_rl.corrections import LossView, Stat
from lightning_rl.losses.base import PolicyLoss
from lightning_rl.losses.clipped_surrogate import check_clip
from lightning_rl.signal.ratios import clipped_weight, policy_ratio


@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyLoss):
    r"""The policy gradient, weighed with a clipped importance ratio, so that no token loses its gradient.

    .. math::
        \ell = -\operatorname{sg}\bigl[\operatorname{clip}(r,\ 1 - \epsilon_{low},\ 1 + \epsilon_{high})\bigr]\,
        A \log p

    Logs ``policy/clipped``, the share of changed weights.

    Source: MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eq. 4.

    Args:
        clip_low: how far below 1 the weight goes, in [0, 1]; 1 for no lower bound.
        clip_high: how far above 1 the weight goes, at least 0.
        anchor: the policy below the ratio: before the update, or the engine's.

    Raises:
        ValueError: if a bound is out of range or the anchor unknown.
    """

    clip_low: float = 1.0
    clip_high: float = 4.0
    anchor: Literal["old", "rollout"] = "old"

    def __post_init__(self) -> None:
        """Checks the bounds, and declares the ratio."""
        check_clip(self.clip_low, self.clip_high)
        check_choices(("old", "rollout"), anchor=self.anchor)
        object.__setattr__(self, "ratio", ("current", self.anchor))
        object.__setattr__(self, "reads", (f"{self.anchor}_logprobs",))

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        anchor, advantages = view.require(f"{self.anchor}_logprobs"), view.require("advantages")
        weight = clipped_weight(view.logprobs, anchor, minimum=1 - self.clip_low, maximum=1 + self.clip_high)
        return -weight * advantages * view.logprobs

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        ratio = policy_ratio(view.logprobs, view.require(f"{self.anchor}_logprobs"))
        changed = (ratio < 1 - self.clip_low) | (ratio > 1 + self.clip_high)
        return {"policy/clipped": Stat.of(changed, view.valid_tokens)}
