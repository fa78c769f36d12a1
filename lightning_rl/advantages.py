"""What ``advantages=`` accepts: a function of one scalar per row, or an estimator that works token by token."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.signal.advantages import gae, grpo, reinforce, rloo
from lightning_rl.signal.masked import GlobalSum, masked_fill_invalid, own_sum, whiten

GroupEstimator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(scores [B], groups [B], rewarded [B]) -> advantages [B]``, such as :func:`lightning_rl.signal.advantages.grpo`."""


class TokenEstimator(ABC):
    """An estimator that reads the shaped reward of each token.

    Attributes:
        reads: names of the rollout fields that it needs.
    """

    reads: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __call__(
        self,
        rewards: Float[Tensor, "B T"],
        values: Float[Tensor, "B T"] | None,
        valid_tokens: Bool[Tensor, "B T"],
        global_sum: GlobalSum = own_sum,
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Advantages and returns of each token, 0 at invalid ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GAE(TokenEstimator):
    """Generalised advantage estimation with a critic, as PPO uses it.

    Source: Schulman et al. 2015, arXiv:1506.02438.

    Args:
        gamma: discount of a step, in [0, 1].
        lam: decay of later temporal differences, in [0, 1].
        whitened: whether advantages are shifted and scaled to mean 0 and deviation 1 over all valid tokens.

    Raises:
        ValueError: if ``gamma`` or ``lam`` leaves [0, 1].
    """

    reads: ClassVar[tuple[str, ...]] = ("values",)

    gamma: float = 1.0
    lam: float = 1.0
    whitened: bool = True

    def __post_init__(self) -> None:
        """Checks the bounds."""
        if not (0 <= self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ValueError(f"expected gamma and lam in [0, 1], got {self.gamma} and {self.lam}")

    @override
    def __call__(
        self,
        rewards: Float[Tensor, "B T"],
        values: Float[Tensor, "B T"] | None,
        valid_tokens: Bool[Tensor, "B T"],
        global_sum: GlobalSum = own_sum,
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        if values is None:
            raise ValueError("expected values for GAE, got none: pass critic= to the module")
        raw = gae(rewards, values, valid_tokens, gamma=self.gamma, lam=self.lam)
        returns = raw + masked_fill_invalid(values, valid_tokens)
        return whiten(raw, valid_tokens, global_sum) if self.whitened else raw, returns


ESTIMATORS: dict[str, GroupEstimator | TokenEstimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "gae": GAE(),
}


def resolve_advantages(advantages: GroupEstimator | TokenEstimator | str) -> GroupEstimator | TokenEstimator:
    """An estimator from an object, a function or a known name.

    Raises:
        ValueError: if the name is unknown; the message lists the known ones.
    """
    if not isinstance(advantages, str):
        return advantages
    if advantages not in ESTIMATORS:
        raise ValueError(f"expected advantages out of {', '.join(ESTIMATORS)} or a function, got {advantages!r}")
    return ESTIMATORS[advantages]
