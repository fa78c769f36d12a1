"""PolicyLoss: which importance ratio a loss carries, what it reads, its value per token."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, Stat
from lightning_rl.corrections.base import Ratio
from lightning_rl.naming import name_of
from lightning_rl.signal.masked import GlobalSum
from lightning_rl.signal.ratios import LOG_RATIO_BOUND, policy_ratio
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
    def name(self) -> str:
        """What messages call it."""
        return type(self).__name__

    @property
    def prepares(self) -> bool:
        """Whether the class overrides :meth:`prepare`."""
        return type(self).prepare is not PolicyLoss.prepare

    def metrics(self, view: LossView) -> dict[str, Stat]:
        """What this loss did to the microbatch, with the same keys at every call."""
        del view
        return {}


class RatioLoss(PolicyLoss):
    """A loss with the ratio of the current policy to the one before the update, unless it says another.

    Attributes:
        reads: names of the fields that it needs, first the log-probabilities below the ratio.
        log_ratio_bound: of the log-ratio on either side before exp; beyond it the gradient is 0.
    """

    ratio = ("current", "old")
    reads = ("old_logprobs",)
    log_ratio_bound: ClassVar[float] = LOG_RATIO_BOUND

    def importance(self, view: LossView) -> Float[Tensor, "B T"]:
        """The ratio at each token, with gradient."""
        return policy_ratio(view.logprobs, view.require(self.reads[0]), bound=self.log_ratio_bound)


@dataclass(frozen=True)
class FunctionLoss(PolicyLoss):
    """A plain function ``(view) -> [b, T]`` as a loss. It declares no ratio, so no illegal pair can be found in it."""

    function: Callable[[LossView], Tensor]

    @property
    @override
    def name(self) -> str:
        return name_of(self.function)

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        return self.function(view)


def prepared_tokens(view: LossView) -> Tensor:
    """The tokens that a loss chose from the whole step, shape [b, T] bool.

    Raises:
        ValueError: if it has not chosen any yet.
    """
    if view.prepared is None:
        raise ValueError("expected the tokens that prepare chose, got none: call prepare with every view of the step")
    return view.prepared
