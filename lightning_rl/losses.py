"""Policy losses as small frozen objects: which importance ratio one carries, what it reads, its value per token."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.hooks import LossView, Stat
from lightning_rl.hooks.callback import Ratio
from lightning_rl.signal.losses import check_clip, clipped_surrogate, policy_gradient, policy_ratio


class PolicyLoss(ABC):
    """A loss per token. Masks, weights and the reduction are the core's business.

    Attributes:
        ratio: (numerator, denominator) of its importance ratio, or None.
        reads: names of the fields that it needs.
    """

    ratio: ClassVar[Ratio | None] = None
    reads: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        """The loss of each token, with gradient; values at invalid tokens do not count."""

    def metrics(self, view: LossView) -> dict[str, Stat]:
        """What this loss did to the microbatch, with the same keys at every call."""
        del view
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedSurrogate(PolicyLoss):
    """PPO's clipped surrogate; logs the shares of tokens whose gradient a bound took away.

    Args:
        clip_low: how far below 1 the ratio still has a gradient, in [0, 1].
        clip_high: how far above 1 it still has one; more than ``clip_low`` is DAPO's clip-higher.
        dual_clip: bound above 1 on the ratio of tokens with negative advantage; None for no bound.

    Raises:
        ValueError: if a bound is out of range.
    """

    ratio: ClassVar[Ratio | None] = ("current", "old")
    reads: ClassVar[tuple[str, ...]] = ("old_logprobs",)

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
        ratio, advantages = policy_ratio(view.logprobs, view.required("old_logprobs")), view.required("advantages")
        low, high = (ratio < 1 - self.clip_low) & (advantages < 0), (ratio > 1 + self.clip_high) & (advantages > 0)
        return Stat.many({"policy/clip_low": low, "policy/clip_high": high}, view.valid_tokens)


@dataclass(frozen=True, slots=True)
class Reinforce(PolicyLoss):
    """The plain policy gradient, without a ratio: exact for samples of the current policy."""

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        return policy_gradient(view.logprobs, view.required("advantages"))


@dataclass(frozen=True, slots=True)
class FunctionLoss(PolicyLoss):
    """A plain function ``(view) -> [b, T]`` as a loss. It declares no ratio, so no illegal pair can be found in it."""

    function: Callable[[LossView], Tensor]

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        return self.function(view)


LOSSES: dict[str, PolicyLoss] = {"ppo": ClippedSurrogate(), "reinforce": Reinforce()}


def resolve_loss(loss: PolicyLoss | Callable[[LossView], Tensor] | str) -> PolicyLoss:
    """A loss object from an object, a function or a known name.

    Raises:
        ValueError: if the name is unknown; the message lists the known ones.
    """
    if isinstance(loss, PolicyLoss):
        return loss
    if callable(loss):
        return FunctionLoss(loss)
    if loss not in LOSSES:
        raise ValueError(f"expected a loss out of {', '.join(LOSSES)}, an object or a function, got {loss!r}")
    return LOSSES[loss]
