"""TraceDecay: the decay of GAE as a function of a row's number of steps."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from lightning_rl.signal.discounted_returns import check_decay
from lightning_rl.utils.arguments import check_numbers


class TraceDecay(ABC):
    """Decay of later temporal differences for each row, from its number of steps."""

    @abstractmethod
    def __call__(self, steps: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Return the decay of each row, in [0, 1].

        Args:
            steps: Number of steps of each row, its valid tokens or turns, shape [B].
        """


@dataclass(frozen=True, slots=True)
class LengthAdaptive(TraceDecay):
    r"""Decay :math:`\lambda = 1 - 1/(\alpha l)`, at least 0, which grows with the length of a row.

    .. math::
        \lambda = \max\Bigl(1 - \frac{1}{\alpha l},\ 0\Bigr)

    With a constant decay, a final reward does not reach the first tokens of a long response (0.95 to the power of 100
    is 0.006), or the advantages of short responses are noisy. Helps if lengths differ by orders of magnitude. The decay
    is 0 up to a length of :math:`1/\alpha`, by default 20 tokens.

    Source: Yue et al. 2025 (VAPO), arXiv:2504.05118, section 4.2.

    Args:
        alpha: Sum of all weights of a row as a fraction of its length, above 0.

    Raises:
        ValueError: Unless ``alpha`` is above 0.

    Example:
        >>> LengthAdaptive(0.05)(torch.tensor([10, 40, 2000]))
        tensor([0.0000, 0.5000, 0.9900])
    """

    alpha: float = 0.05

    def __post_init__(self) -> None:
        """Check the option."""
        check_numbers(above=0, finite=True, alpha=self.alpha)

    @override
    def __call__(self, steps: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        return (1 - 1 / (self.alpha * steps.clamp(min=1))).clamp(min=0)


@dataclass(frozen=True, slots=True)
class RelativePosition(TraceDecay):
    r"""Decay :math:`\lambda = q^{1/(l-1)}`, for which the final reward has weight q at the first step of every row.

    .. math::
        \lambda = q^{1/(l-1)}

    The step in the middle has weight :math:`\sqrt q`. Unlike :class:`LengthAdaptive`, it is above 0 for short rows.

    Source: AReaL, ``areal/trainer/ppo/lambda_fn.py``; after VAPO, arXiv:2504.05118, section 4.2.

    Args:
        kept: Weight q, above 0 and at most 1.

    Raises:
        ValueError: Unless ``kept`` is above 0 and at most 1.

    Example:
        >>> RelativePosition(0.5)(torch.tensor([1, 2, 3]))
        tensor([1.0000, 0.5000, 0.7071])
    """

    kept: float = 0.5

    def __post_init__(self) -> None:
        """Check the option."""
        check_numbers(above=0, at_most=1, kept=self.kept)

    @override
    def __call__(self, steps: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        kept = torch.full(steps.shape, self.kept, device=steps.device)
        return torch.where(steps > 1, kept ** (1 / (steps - 1).clamp(min=1)), 1.0)


def check_trace_decay(**decays: float | TraceDecay) -> None:
    """Raise a ValueError that names a decay which is neither in [0, 1] nor a :class:`TraceDecay`."""
    check_decay(**{name: decay for name, decay in decays.items() if not isinstance(decay, TraceDecay)})


def decay_of(decay: float | TraceDecay, steps: Int[Tensor, " B"]) -> float | Float[Tensor, " B"]:
    """Return the decay of each row, or the constant decay."""
    return decay(steps) if isinstance(decay, TraceDecay) else decay
