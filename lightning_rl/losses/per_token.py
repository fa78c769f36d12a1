"""Policy losses that look at every token by itself."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, Stat
from lightning_rl.losses.base import OldRatioLoss, PolicyLoss, clip_metrics
from lightning_rl.signal.losses import (
    Divergence,
    check_clip,
    check_temperatures,
    check_trust_region,
    cispo,
    clipped_surrogate,
    dppo,
    outside_trust_region,
    policy_gradient,
    sapo,
)
from lightning_rl.signal.ratios import policy_ratio


@dataclass(frozen=True, kw_only=True)
class ClippedSurrogate(OldRatioLoss):
    """PPO's clipped surrogate; logs the shares of tokens whose gradient a bound took away.

    Source: Schulman et al. 2017, arXiv:1707.06347.

    Args:
        clip_low: how far below 1 the ratio still has a gradient, in [0, 1].
        clip_high: how far above 1 it still has one; more than ``clip_low`` is DAPO's clip-higher.
        dual_clip: bound above 1 on the ratio of tokens with negative advantage; None for no bound.

    Raises:
        ValueError: if a bound is out of range.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        """Checks the bounds."""
        check_clip(self.clip_low, self.clip_high, self.dual_clip)

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        return clipped_surrogate(
            view.logprobs,
            view.required("old_logprobs"),
            view.required("advantages"),
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        ratio = policy_ratio(view.logprobs, view.required("old_logprobs"))
        return clip_metrics(ratio, view, self.clip_low, self.clip_high)


@dataclass(frozen=True)
class Reinforce(PolicyLoss):
    """The plain policy gradient, without a ratio: exact for samples of the current policy.

    Source: Williams 1992.
    """

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        return policy_gradient(view.logprobs, view.required("advantages"))


@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyLoss):
    """The policy gradient weighed with a clipped ratio; logs ``policy/clipped``, the share of changed weights.

    Source: MiniMax 2025, arXiv:2506.13585.

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
        check_clip(self.clip_low, self.clip_high, None)
        if self.anchor not in ("old", "rollout"):
            raise ValueError(f"expected anchor old or rollout, got {self.anchor!r}")
        object.__setattr__(self, "ratio", ("current", self.anchor))
        object.__setattr__(self, "reads", (f"{self.anchor}_logprobs",))

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        anchor, advantages = view.required(f"{self.anchor}_logprobs"), view.required("advantages")
        return cispo(view.logprobs, anchor, advantages, clip_low=self.clip_low, clip_high=self.clip_high)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        ratio = policy_ratio(view.logprobs, view.required(f"{self.anchor}_logprobs"))
        changed = (ratio < 1 - self.clip_low) | (ratio > 1 + self.clip_high)
        return {"policy/clipped": Stat.of(changed, view.valid_tokens)}


@dataclass(frozen=True, kw_only=True)
class DPPO(PolicyLoss):
    """A surrogate without tokens outside a trust region; logs ``policy/outside``, their share.

    Source: Qi et al. 2026, arXiv:2602.04879.

    Args:
        divergence: ``"tv"`` or ``"kl"``, between "this token" and "another".
        low: bound for tokens that a negative advantage made less likely.
        high: bound for tokens that a positive advantage made more likely.
        cap: None for the ratio itself; a number for the score-function form with the ratio cut off there.

    Raises:
        ValueError: if an option is out of range.
    """

    ratio = ("current", "rollout")
    reads = ("rollout_logprobs",)

    divergence: Divergence = "tv"
    low: float = 0.2
    high: float = 0.2
    cap: float | None = None

    def __post_init__(self) -> None:
        """Checks the bounds."""
        check_trust_region(self.divergence, self.low, self.high, self.cap)

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        rollout, advantages = view.required("rollout_logprobs"), view.required("advantages")
        region = {"divergence": self.divergence, "low": self.low, "high": self.high}
        return dppo(view.logprobs, rollout, advantages, cap=self.cap, **region)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        rollout, advantages = view.required("rollout_logprobs"), view.required("advantages")
        region = {"divergence": self.divergence, "low": self.low, "high": self.high}
        outside = outside_trust_region(view.logprobs, rollout, advantages, **region)
        return {"policy/outside": Stat.of(outside, view.valid_tokens)}


@dataclass(frozen=True, kw_only=True)
class SAPO(OldRatioLoss):
    """A soft gate on the ratio instead of a clip.

    Source: Gao et al. 2025, arXiv:2511.20347.

    Args:
        tau_positive: temperature for positive advantages, above 0.
        tau_negative: temperature for the others; the larger, the sooner their gradient fades.

    Raises:
        ValueError: if a temperature is not positive.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        """Checks the temperatures."""
        check_temperatures(self.tau_positive, self.tau_negative)

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        taus = {"tau_positive": self.tau_positive, "tau_negative": self.tau_negative}
        return sapo(view.logprobs, view.required("old_logprobs"), view.required("advantages"), **taus)
