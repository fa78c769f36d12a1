"""ValueLoss: what the critic minimises at each token."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from lightning_rl.signal.losses import check_value_options, value_loss

ValueFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(values, old_values, returns) -> loss of each token``, all [b, T]; ``values`` carry the gradient."""


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """Half the squared error, the larger of plain and clipped.

    Source: Schulman et al. 2017, arXiv:1707.06347; clipping: the authors' code (openai/baselines, ppo2).

    Args:
        coef: what the reduced loss is multiplied with, at least 0.
        clip: how far a value may move within a rollout, above 0; None for no clip.
        huber: error from which on the loss grows linearly, above 0; infinite for never.

    Raises:
        ValueError: if an option is out of range.
    """

    coef: float = 1.0
    clip: float | None = 0.2
    huber: float = math.inf

    def __post_init__(self) -> None:
        """Checks the bounds."""
        if not (self.coef >= 0 and math.isfinite(self.coef)):
            raise ValueError(f"expected coef >= 0, got {self.coef}")
        check_value_options(self.clip, self.huber)

    def __call__(
        self, values: Float[Tensor, "B T"], old_values: Float[Tensor, "B T"], returns: Float[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """The loss of each token."""
        return value_loss(values, old_values, returns, clip=self.clip, huber=self.huber)


DEFAULT_VALUE_LOSS = ValueLoss()
