"""PolicyLoss: base class of losses with a value per token."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, Stat
from lightning_rl.corrections.rl_callback import Ratio
from lightning_rl.signal.importance_ratios import LOG_RATIO_BOUND, policy_ratio
from lightning_rl.signal.masked import GlobalSum
from lightning_rl.signal.selection import GlobalConcat
from lightning_rl.utils.naming import CheckedNames, name_of


class PolicyLoss(CheckedNames, ABC):
    """Loss per token. Masks, weights and the reduction are applied by the core.

    Attributes:
        ratio: (numerator, denominator) of its importance ratio, or None.
        reads: Names of the rollout fields that it needs.
        per_response: True if its ratio is one per response, so that the paper averages over responses.
        token_wise: True if loss and metrics of a token depend on no other token, so that the contexts of a long sample
            may be in different microbatches. Each class declares it for itself.
    """

    per_response: ClassVar[bool] = False
    token_wise: ClassVar[bool] = False
    ratio: Ratio | None = None
    reads: tuple[str, ...] = ()

    @abstractmethod
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        """Return the loss of each token, with gradient; values at invalid tokens are ignored."""

    def prepare(
        self, views: Sequence[LossView], global_sum: GlobalSum, global_concat: GlobalConcat
    ) -> Sequence[Tensor] | None:
        """Compute values from the whole optimizer step, before its first backward and without gradient.

        A loss that overrides this method costs one more forward pass per step.

        Args:
            views: Every microbatch of this rank, with the current log-probabilities.
            global_sum: Sums tensors over the ranks.
            global_concat: Concatenates tensors [N] of the ranks.

        Returns:
            One tensor [b, T] per view, available as ``view.prepared``.
        """
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Name of the loss in messages."""
        return type(self).__name__

    @property
    def prepares(self) -> bool:
        """True if the class overrides :meth:`prepare`."""
        return type(self).prepare is not PolicyLoss.prepare

    def metrics(self, view: LossView) -> dict[str, Stat]:
        """Return statistics of a microbatch, with the same keys at every call."""
        del view
        return {}


class RatioLoss(PolicyLoss):
    """Loss with an importance ratio, by default of the current policy to the one before the update.

    Attributes:
        reads: Names of the rollout fields that it needs; the first is the denominator of the ratio.
        log_ratio_bound: Bound of the absolute log-ratio before exp; beyond it the gradient is 0.
    """

    ratio = ("current", "old")
    reads = ("old_logprobs",)
    log_ratio_bound: ClassVar[float] = LOG_RATIO_BOUND

    def importance(self, view: LossView) -> Float[Tensor, "B T"]:
        """Return the ratio at each token, with gradient."""
        return policy_ratio(view.logprobs, view.require(self.reads[0]), bound=self.log_ratio_bound)


@dataclass(frozen=True)
class FunctionLoss(PolicyLoss):
    """Loss from a function ``(view) -> [b, T]``. Without a declared ratio, invalid pairs of ratios are not detected."""

    function: Callable[[LossView], Tensor]

    @property
    @override
    def name(self) -> str:
        return name_of(self.function)

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        return self.function(view)


def prepared_tokens(view: LossView) -> Tensor:
    """Return the tokens that ``prepare`` selected, shape [b, T] bool.

    Raises:
        ValueError: If ``prepare`` has not been called.
    """
    if view.prepared is None:
        raise ValueError("expected tokens selected by prepare, got none: call prepare with every view of the step")
    return view.prepared
