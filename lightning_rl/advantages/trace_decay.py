"""TraceDecay: the decay of GAE as a function of how many time steps a row has."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from lightning_rl.arguments import check_numbers
from lightning_rl.signal.returns import check_decay


class TraceDecay(ABC):
    """A decay of later temporal differences for each row, by its number of steps."""

    @abstractmethod
    def __call__(self, steps: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        """The decay of each row, in [0, 1].

        Args:
            steps: time steps of each row, shape [B]: its valid tokens, or its turns.
        """


@dataclass(frozen=True, slots=True)
class LengthAdaptive(TraceDecay):
    r"""The decay :math:`\lambda = 1 - 1/(\alpha l)`, at least 0: the longer a row, the further its last reward reaches.

    .. math::
        \lambda = \max\Bigl(1 - \frac{1}{\alpha l},\ 0\Bigr)

    With one decay for all rows a reward at the end is lost on the first tokens of a long answer (0.95 to the power of
    100 is 0.006), or the advantages of a short one are noisy. Helps where lengths differ by orders of magnitude. It is
    0 up to a length of :math:`1/\alpha`, by default 20 tokens: there each token learns from the next value alone.

    Source: Yue et al. 2025 (VAPO), arXiv:2504.05118, section 4.2.

    Args:
        alpha: how far it reaches: the sum of all weights of a row is this share of its length. Above 0.

    Raises:
        ValueError: unless ``alpha`` is above 0.

    Example:
        >>> LengthAdaptive(0.05)(torch.tensor([10, 40, 2000]))
        tensor([0.0000, 0.5000, 0.9900])
    """

    alpha: float = 0.05

    def __post_init__(self) -> None:
        """Checks the bounds."""
        check_numbers(above=0, finite=True, alpha=self.alpha)

    @override
    def __call__(self, steps: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        return (1 - 1 / (self.alpha * steps.clamp(min=1))).clamp(min=0)


@dataclass(frozen=True, slots=True)
class RelativePosition(TraceDecay):
    r"""The decay :math:`\lambda = q^{1/(l-1)}`: how much of the last reward reaches a place in a row of any length.

    .. math::
        \lambda = q^{1/(l-1)}

    The first step of every row keeps the share q of the reward at the end, the one in the middle its root. Helps as
    :class:`LengthAdaptive` does, and does not cut short rows off.

    Source: AReaL, ``areal/trainer/ppo/lambda_fn.py``; after VAPO, arXiv:2504.05118, section 4.2.

    Args:
        kept: the share q, above 0 and at most 1.

    Raises:
        ValueError: unless ``kept`` is above 0 and at most 1.

    Example:
        >>> RelativePosition(0.5)(torch.tensor([1, 2, 3]))
        tensor([1.0000, 0.5000, 0.7071])
    """

    kept: float = 0.5

    def __post_init__(self) -> None:
        """Checks the bounds."""
        check_numbers(above=0, at_most=1, kept=self.kept)

    @override
    def __call__(self, steps: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        shares = torch.full(steps.shape, self.kept, device=steps.device)
        return torch.where(steps > 1, shares ** (1 / (steps - 1).clamp(min=1)), 1.0)


def check_trace_decay(**decays: float | TraceDecay) -> None:
    """Raises a ValueError that names a decay which is neither in [0, 1] nor a :class:`TraceDecay`."""
    check_decay(**{name: decay for name, decay in decays.items() if not isinstance(decay, TraceDecay)})


def decay_of(decay: float | TraceDecay, steps: Int[Tensor, " B"]) -> float | Float[Tensor, " B"]:
    """The decay of each row, or the one of all rows."""
    return decay(steps) if isinstance(decay, TraceDecay) else decay
