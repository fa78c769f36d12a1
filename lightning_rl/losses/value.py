"""ValueLoss: loss of the critic per token."""

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from lightning_rl.signal.subgradients import absolute_value, clamp, maximum
from lightning_rl.utils.arguments import check_numbers


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    r"""Half the squared error of the critic per token, the larger of plain and clipped.

    .. math:: \ell = \tfrac12 \max\bigl((V - R)^2,\ (V_{old} + \operatorname{clip}(V - V_{old}, \pm c) - R)^2\bigr)

    Source: Schulman et al. 2017, arXiv:1707.06347; clipping: the authors' code (openai/baselines, ppo2).

    Args:
        coef: Coefficient of the reduced loss, at least 0.
        clip: Largest change of a value within a rollout, above 0; None for no clip.
        huber: Error above which the loss is linear, above 0; infinite for never.

    Raises:
        ValueError: If an option is out of range; when called, if the tensors differ in shape.

    Example:
        >>> import torch
        >>> values, old_values, returns = torch.tensor([[0.5]]), torch.tensor([[0.0]]), torch.tensor([[1.0]])
        >>> ValueLoss(clip=None)(values, old_values, returns), ValueLoss(clip=0.1)(values, old_values, returns)
        (tensor([[0.1250]]), tensor([[0.4050]]))
    """

    coef: float = 1.0
    clip: float | None = 0.2
    huber: float = math.inf

    def __post_init__(self) -> None:
        """Check the options."""
        check_numbers(at_least=0, finite=True, coef=self.coef)
        check_numbers(above=0, optional=True, clip=self.clip)
        check_numbers(above=0, huber=self.huber)

    def __call__(
        self, values: Float[Tensor, "B T"], old_values: Float[Tensor, "B T"], returns: Float[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Return the loss of each token, without the coefficient; ``values`` carries the gradient."""
        if not values.shape == old_values.shape == returns.shape:
            shapes = {"values": values, "old_values": old_values, "returns": returns}
            got = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in shapes.items())
            raise ValueError(f"expected tensors of one shape, got {got}")
        if self.clip is None:
            return self._error(values, returns)
        clipped = old_values + clamp(values - old_values, -self.clip, self.clip)
        return maximum(self._error(values, returns), self._error(clipped, returns))

    def _error(self, values: Tensor, returns: Tensor) -> Tensor:
        gap = absolute_value(values - returns)
        bounded = clamp(gap, high=self.huber)
        return bounded * (gap - 0.5 * bounded)  # quadratic up to the bound, then linear
