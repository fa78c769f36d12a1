"""PolicyLoss: which importance ratio a loss carries, what it reads, its value per token."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, Stat
from lightning_rl.corrections.base import Ratio
from lightning_rl.signal.masked import GlobalSum
from lightning_rl.signal.selection import GlobalConcat


class PolicyLoss(ABC):
    """A loss per token. Masks, weights and the reduction are the core's business.

    Attributes:
        ratio: (numerator, denominator) of its importance ratio, or None.
        reads: names of the fields that it needs.
    """

    ratio: Ratio | None = None
    reads: tuple[str, ...] = ()

    @abstractmethod
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        """The loss of each token, with gradient; values at invalid tokens do not count."""

    def prepare(
        self, views: Sequence[LossView], global_sum: GlobalSum, global_concat: GlobalConcat
    ) -> Sequence[Tensor] | None:
        """Looks at the whole optimizer step, once before its first backward and without gradient.

        A loss that overrides this costs one more forward pass over the step.

        Args:
            views: every microbatch of this rank, with the current log-probabilities.
            global_sum: adds tensors up over the ranks.
            global_concat: joins tensors [N] of the ranks.

        Returns:
            One tensor [b, T] for each view, which comes back as ``view.prepared``.
        """
        raise NotImplementedError

    @property
    def prepares(self) -> bool:
        """Whether the class overrides :meth:`prepare`."""
        return type(self).prepare is not PolicyLoss.prepare

    def metrics(self, view: LossView) -> dict[str, Stat]:
        """What this loss did to the microbatch, with the same keys at every call."""
        del view
        return {}


class OldRatioLoss(PolicyLoss):
    """A loss whose ratio is that of the current policy to the one before the update."""

    ratio = ("current", "old")
    reads = ("old_logprobs",)


def clip_metrics(ratio: Tensor, view: LossView, low: float, high: float) -> dict[str, Stat]:
    """The shares of valid tokens that are below the band with a bad, and above it with a good advantage."""
    advantages = view.required("advantages")
    below, above = (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)
    return Stat.many({"policy/clip_low": below, "policy/clip_high": above}, view.valid_tokens)


@dataclass(frozen=True)
class FunctionLoss(PolicyLoss):
    """A plain function ``(view) -> [b, T]`` as a loss. It declares no ratio, so no illegal pair can be found in it."""

    function: Callable[[LossView], Tensor]

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        return self.function(view)
