"""Warning of optimizer steps that are lost in the rounding of weights in half precision."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

SAMPLED = 4096  # weights of each parameter that are compared


@dataclass(slots=True)
class LostUpdates:
    """Measurement of the first optimizer step of a fit that has no higher learning rate than the step before.

    Attributes:
        rate: Learning rate of the step before.
        measured: True after the measurement, or if no weight is in half precision.
    """

    rate: float = -1.0
    measured: bool = False

    @contextmanager
    def watch(self, parameters: Iterable[nn.Parameter], rate: float) -> Iterator[None]:
        """Measure the optimizer step in the context; warn if most weights with a gradient do not move.

        Args:
            parameters: Parameters of the optimizer.
            rate: Learning rate of the step.
        """
        rises, self.rate = rate > self.rate, rate
        if self.measured or rises:
            yield
            return
        halves = [one for one in parameters if one.dtype in (torch.bfloat16, torch.float16)]
        before = [(one, _sample(one).clone()) for one in halves if one.requires_grad]
        yield
        self.measured = bool(before) or not halves  # frozen ones may train later
        pairs = [(one, old) for one, old in before if one.grad is not None]
        updated = sum(int((_sample(one.grad) != 0).sum()) for one, _ in pairs)
        still = sum(int(((_sample(one.grad) != 0) & (_sample(one) == old)).sum()) for one, old in pairs)
        if updated and still > updated / 2:
            rank_zero_warn(
                f"{still / updated:.0%} of {updated} weights with a gradient did not move in an optimizer step at a "
                f"learning rate of {rate:g}: the step is lost in the rounding of weights in {halves[0].dtype}; use "
                'Trainer(precision="bf16-mixed"), whose weights are float32, or a higher learning rate'
            )


def _sample(tensor: Any) -> Tensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().reshape(-1)[:SAMPLED]
