"""Critic: the model that estimates values, and its loss."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

from lightning_rl.losses.value import ValueLoss
from lightning_rl.policy.build import ModelSource


@dataclass(frozen=True)
class Critic:
    """Model that estimates the value of each token, with its loss.

    Args:
        source: ``"shared"`` for a value head on the policy's hidden states, or a separate model in any form that
            ``policy`` takes.
        loss: Loss of the values, with its coefficient.

    Raises:
        ValueError: If the loss is of another type.
    """

    source: ModelSource
    _: KW_ONLY
    loss: ValueLoss = ValueLoss()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        """Check the type of the loss."""
        if not isinstance(self.loss, ValueLoss):
            got = f"the class {self.loss.__name__}" if isinstance(self.loss, type) else repr(self.loss)
            raise ValueError(f"expected loss of Critic to be an object such as ValueLoss(coef=0.5), got {got}")

    @classmethod
    def of(cls, critic: Any) -> Self | None:
        """Return a critic for a critic, a source or None."""
        return critic if critic is None or isinstance(critic, cls) else cls(critic)
