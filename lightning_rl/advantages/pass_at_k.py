"""PassAtK: difference of the best score of a group to the second best."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from lightning_rl.advantages.estimator import RowEstimator
from lightning_rl.advantages.group_relative import check_epsilon
from lightning_rl.signal.masked import group_index, masked_fill_invalid
from lightning_rl.signal.statistics import group_statistics
from lightning_rl.utils.arguments import check_bools


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtK(RowEstimator):
    r"""Best score of the group minus the best of the others, :math:`\max_j s_j - \max_{j \ne i} s_j`.

    .. math::
        A_i = s_i - \max_{j \ne i} s_j\ \text{if}\ s_i = \max_j s_j\ \text{else}\ 0

    All rows but the best get 0. This is the gradient of the expected maximum of k responses (k is the group size), with
    the maximum of the others as baseline. If two responses are best, all get 0. Helps if one good response out of k
    counts, as with a verifier at inference, and if GRPO reduces diversity.

    Source: Tang et al. 2025, arXiv:2503.19595, the leave-one-out estimate of a k-sample objective, for the maximum.

    Args:
        scaled: Divide the difference by the standard deviation of the group, as in GRPO.
        unbiased: Divide the variance by n - 1 instead of n.
        epsilon: Constant added to the standard deviation, at least 0.

    Raises:
        ValueError: If ``epsilon`` is negative.

    Example:
        >>> PassAtK().per_row(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 0]), torch.ones(3, dtype=torch.bool))
        tensor([0., 0., 2.])
    """

    within_groups = True
    shift_invariant = True

    scaled: bool = False
    unbiased: bool = True
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        """Check the options."""
        check_epsilon(self.epsilon)
        check_bools(scaled=self.scaled, unbiased=self.unbiased)

    @override
    def per_row(
        self, scores: Float[Tensor, " B"], groups: Int[Tensor, " B"], rewarded: Bool[Tensor, " B"]
    ) -> Float[Tensor, " B"]:
        group = group_statistics(scores, groups, rewarded)
        index, number = group_index(groups)
        exact = masked_fill_invalid(scores.double(), rewarded, -torch.inf)

        def largest(values: Tensor) -> Tensor:
            return values.new_full((number,), -torch.inf).scatter_reduce(0, index, values, "amax")[index]

        best = exact == largest(exact)
        second = largest(torch.where(best, -torch.inf, exact))
        alone = best & (torch.zeros_like(exact).index_add(0, index, best.double())[index] == 1)
        gap = exact - second
        if self.scaled:
            gap = gap / (group.std(unbiased=self.unbiased) + self.epsilon)
        return torch.where(group.spread & alone, gap, 0.0).to(scores.dtype)
