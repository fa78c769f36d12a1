"""Normalized: score minus a mean over a standard deviation, each of the group, of the batch or omitted."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.advantages.estimator import Advantages, RewardSignal, RowEstimator
from lightning_rl.advantages.group_relative import check_epsilon
from lightning_rl.signal.masked import GlobalSum, local_sum, masked_fill_invalid
from lightning_rl.signal.statistics import batch_statistics, group_statistics
from lightning_rl.utils.arguments import check_bools

Level = Literal["batch", "group", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalized(RowEstimator):
    r"""Score minus a mean over a standard deviation, each of the row's group, of the batch or omitted.

    .. math::
        A_i = \frac{s_i - \mu}{\sigma + \epsilon}, \qquad \mu, \sigma\ \text{of the group or the batch, or } 0, 1

    As (mean, std): (group, group) is GRPO, (group, none) is Dr. GRPO, or RLOO with ``leave_one_out``, and (group,
    batch) is LitePPO. Rows outside ``rewarded`` get 0, and so do rows whose group or batch, if used, has equal scores.

    Source: LitePPO (group mean, batch deviation): Liu et al. 2025, arXiv:2508.08221.

    Args:
        mean: Population of the subtracted mean: ``"group"``, ``"batch"`` or ``"none"``.
        std: Population of the standard deviation, around its own mean: ``"group"``, ``"batch"`` or ``"none"``.
        leave_one_out: Subtract the mean of the *other* rows, which scales the deviation by n / (n - 1).
        unbiased: Divide the variance by n - 1 instead of n.
        epsilon: Constant added to the standard deviation.

    Raises:
        ValueError: If a level is unknown or the options are incompatible.
    """

    mean: Level = "group"
    std: Level = "group"
    leave_one_out: bool = False
    unbiased: bool = True
    epsilon: float = 1e-6
    within_groups: bool = field(init=False, repr=False, compare=False)  # pyrefly: ignore[bad-override]
    shift_invariant: bool = field(init=False, repr=False, compare=False)  # pyrefly: ignore[bad-override]

    def __post_init__(self) -> None:
        """Check the options and set ``within_groups`` and ``shift_invariant``."""
        levels = get_args(Level)
        if self.mean not in levels or self.std not in levels:
            raise ValueError(f"expected mean and std out of {', '.join(levels)}, got {self.mean!r} and {self.std!r}")
        if self.leave_one_out and self.mean == "none":
            raise ValueError(
                'expected leave_one_out=False with mean="none", got True: without a mean there is nothing to leave out'
            )
        check_epsilon(self.epsilon)
        check_bools(leave_one_out=self.leave_one_out, unbiased=self.unbiased)
        object.__setattr__(self, "within_groups", "batch" not in (self.mean, self.std))
        object.__setattr__(self, "shift_invariant", self.mean == "group" and self.std != "batch")

    @override
    def per_row(
        self, scores: Tensor, groups: Tensor, rewarded: Tensor, global_sum: GlobalSum = local_sum
    ) -> Float[Tensor, " B"]:
        statistics = {
            "group": lambda: group_statistics(scores, groups, rewarded),
            "batch": lambda: batch_statistics(scores, rewarded, global_sum),
        }
        populations = {level: statistics[level]() for level in sorted({self.mean, self.std} - {"none"})}
        live, advantages = rewarded, masked_fill_invalid(scores, rewarded).double()
        for population in populations.values():
            live = live & population.spread
        if self.mean != "none":
            center = populations[self.mean]
            advantages = advantages - center.mean
            if self.leave_one_out:
                advantages = advantages * center.number / (center.number - 1).clamp(min=1)
        if self.std != "none":
            advantages = advantages / (populations[self.std].std(unbiased=self.unbiased) + self.epsilon)
        return torch.where(live, advantages, 0.0).to(scores.dtype)

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        per_row = self.per_row(signal.scores, signal.groups, signal.rewarded, signal.global_sum)
        return Advantages(signal.spread_out(per_row))
