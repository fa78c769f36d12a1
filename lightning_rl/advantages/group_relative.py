"""GRPO, Dr. GRPO, RLOO and MaxRL: scores relative to the other responses to the same prompt.

Rows outside ``rewarded`` enter no statistic and get 0. Rows in groups of equal scores get exactly 0.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.advantages.estimator import RowEstimator
from lightning_rl.signal.masked import masked_fill_invalid
from lightning_rl.signal.reward_domain import RewardDomain
from lightning_rl.signal.statistics import Population, group_statistics
from lightning_rl.utils.arguments import check_bools, check_numbers


class GroupRelative(RowEstimator):
    """Estimator that compares each score with the statistics of its group."""

    within_groups = True
    shift_invariant = True

    @abstractmethod
    def relative(self, scores: Float[Tensor, " B"], group: Population) -> Float[Tensor, " B"]:
        """Return the advantage of each row, in float64; ignored for rows in groups of equal scores."""

    @override
    def per_row(self, scores: Tensor, groups: Tensor, rewarded: Tensor) -> Float[Tensor, " B"]:
        group = group_statistics(scores, groups, rewarded)
        relative = self.relative(masked_fill_invalid(scores, rewarded).double(), group)
        return torch.where(group.spread, relative, 0.0).to(scores.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO(GroupRelative):
    r"""Score standardized within its group, :math:`(s - \bar s) / (\sigma + \epsilon)`.

    .. math::
        A_i = \frac{s_i - \bar s}{\sigma + \epsilon}

    Source: Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, section 4.1.2.

    Args:
        unbiased: Divide the variance by n - 1 instead of n.
        epsilon: Constant added to the standard deviation, at least 0.

    Raises:
        ValueError: If ``epsilon`` is negative.

    Example:
        >>> GRPO().per_row(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 1]), torch.ones(3, dtype=torch.bool))
        tensor([ 0.7071, -0.7071,  0.0000])
    """

    unbiased: bool = True
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        """Check the options."""
        check_epsilon(self.epsilon)
        check_bools(unbiased=self.unbiased)

    @override
    def relative(self, scores: Float[Tensor, " B"], group: Population) -> Float[Tensor, " B"]:
        return (scores - group.mean) / (group.std(unbiased=self.unbiased) + self.epsilon)


@dataclass(frozen=True, slots=True)
class DrGRPO(GroupRelative):
    r"""Score minus the mean of its group, :math:`s - \bar s`, which weights hard and easy prompts equally.

    .. math::
        A_i = s_i - \bar s

    Source: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783.
    """

    @override
    def relative(self, scores: Float[Tensor, " B"], group: Population) -> Float[Tensor, " B"]:
        return scores - group.mean


@dataclass(frozen=True, slots=True)
class RLOO(GroupRelative):
    r"""Score minus the mean of the *other* rows of its group, :math:`(s - \bar s)\, n / (n - 1)`.

    .. math::
        A_i = s_i - \frac{1}{n - 1} \sum_{j \ne i} s_j = \frac{n}{n - 1}\,(s_i - \bar s)

    Source: Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019.
    """

    @override
    def relative(self, scores: Float[Tensor, " B"], group: Population) -> Float[Tensor, " B"]:
        return (scores - group.mean) * group.number / (group.number - 1).clamp(min=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxRL(GroupRelative):
    r"""Score relative to the mean of its group, :math:`(s - \bar s) / (\bar s + \epsilon)`.

    .. math::
        A_i = \frac{s_i - \bar s}{\bar s + \epsilon}

    Derived for rewards of 0 and 1, where it approximates maximum likelihood; 0 unless the mean is positive. A score
    below 0 ends the run.

    Source: Tajwar et al. 2026 (MaxRL), arXiv:2602.02710, algorithm 1.

    Args:
        epsilon: Constant added to the mean, at least 0.

    Raises:
        ValueError: If ``epsilon`` is negative.
    """

    shift_invariant = False
    domain = RewardDomain(0.0, "add a constant to the rewards, so that scores are at least 0, or use GRPO")

    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        """Check the options."""
        check_epsilon(self.epsilon)

    @override
    def relative(self, scores: Float[Tensor, " B"], group: Population) -> Float[Tensor, " B"]:
        mean = (group.mean.clamp(min=0) + self.epsilon).clamp(min=1e-300)
        return torch.where(group.mean > 0, (scores - group.mean) / mean, 0.0)


def check_epsilon(epsilon: float) -> None:
    """Raise a ValueError if ``epsilon`` is negative."""
    check_numbers(at_least=0, finite=True, epsilon=epsilon)
