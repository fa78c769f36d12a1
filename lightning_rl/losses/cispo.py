"""CISPO: policy gradient with a clipped importance weight."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, Stat
from lightning_rl.losses.clipped_surrogate import check_clip
from lightning_rl.losses.policy_loss import PolicyLoss
from lightning_rl.signal.importance_ratios import clipped_weight, policy_ratio
from lightning_rl.utils.arguments import check_choices


@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyLoss):
    r"""Policy gradient with a clipped importance weight, which keeps the gradient of every token.

    .. math::
        \ell = -\operatorname{sg}\bigl[\operatorname{clip}(r,\ 1 - \epsilon_{low},\ 1 + \epsilon_{high})\bigr]\,
        A \log p

    Logs the fraction of clipped weights as ``policy/clipped``.

    Source: MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eq. 4.

    Args:
        clip_low: Distance of the lower bound from 1, in [0, 1]; 1 for no lower bound.
        clip_high: Distance of the upper bound from 1, at least 0.
        anchor: Denominator of the ratio: ``"old"``, the policy before the update, or ``"rollout"``, the engine's.

    Raises:
        ValueError: If a distance is out of range, the two are bounds such as 0.8 and 1.2, or the anchor is unknown.
    """

    token_wise: ClassVar[bool] = True
    clip_low: float = 1.0
    clip_high: float = 4.0
    anchor: Literal["old", "rollout"] = "old"

    def __post_init__(self) -> None:
        """Check the options and set ``ratio`` and ``reads``."""
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
        clipped = (ratio < 1 - self.clip_low) | (ratio > 1 + self.clip_high)
        return {"policy/clipped": Stat.of(clipped, view.valid_tokens)}
