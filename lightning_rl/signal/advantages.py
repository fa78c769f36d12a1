"""Advantages of whole rows: how much better a response did than expected, from one scalar reward for each.

A row outside ``rewarded`` enters no statistic and gets 0, and so does a row whose group (or batch, where that is the
level) has no two different rewards, by test and not by an epsilon. Statistics are float64, two passes.
"""

from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rl.signal.masked import GlobalSum, global_moments, group_index, masked_fill_invalid, own_sum

Level = Literal["batch", "group", "none"]


class Population(NamedTuple):
    """Each row's group or batch, summed up over its rewarded rows; every field has shape [B]."""

    number: Float[Tensor, " B"]  # of rewarded rows
    mean: Float[Tensor, " B"]
    squares: Float[Tensor, " B"]  # sum of the squared deviations from the mean
    spread: Bool[Tensor, " B"]  # the row is rewarded and the population has different rewards

    def std(self, *, unbiased: bool = True) -> Float[Tensor, " B"]:
        """The standard deviation; 0 for fewer than two rows."""
        return (self.squares / (self.number - int(unbiased)).clamp(min=1)).sqrt()


def group_statistics(
    scores: Float[Tensor, " B"], groups: Int[Tensor, " B"], rewarded: Bool[Tensor, " B"]
) -> Population:
    """Count, mean and deviation of each row's group over the rewarded rows alone. A group lies on one rank."""
    index, number = group_index(groups)
    exact = masked_fill_invalid(scores, rewarded).double()

    def per_group(values: Tensor) -> Tensor:
        return torch.zeros(number, dtype=torch.float64, device=values.device).index_add_(0, index, values)[index]

    def extreme(fill: float, reduce: str) -> Tensor:
        start = torch.full((number,), fill, dtype=torch.float64, device=exact.device)
        return start.scatter_reduce_(0, index, torch.where(rewarded, exact, fill), reduce)[index]

    count = per_group(rewarded.double())
    mean = per_group(exact) / count.clamp(min=1)
    squares = per_group(torch.where(rewarded, exact - mean, 0.0).square())
    spread = rewarded & ~(extreme(-torch.inf, "amax") <= extreme(torch.inf, "amin"))  # NaN has spread: never hide it
    return Population(count, mean, squares, spread)


def batch_statistics(
    scores: Float[Tensor, " B"], rewarded: Bool[Tensor, " B"], global_sum: GlobalSum = own_sum
) -> Population:
    """The same over the rewarded rows of all ranks, the same for every row."""
    batch = global_moments(scores, rewarded, global_sum)
    return Population(
        batch.number.expand(len(scores)),
        batch.mean.expand(len(scores)),
        batch.squares.expand(len(scores)),
        batch.spread & rewarded,
    )


def check_levels(mean: Level, std: Level, *, leave_one_out: bool, epsilon: float) -> None:
    """Raises a ValueError unless the options of :func:`normalised` fit together."""
    known = get_args(Level)
    if mean not in known or std not in known:
        raise ValueError(f"expected mean and std out of {', '.join(known)}, got {mean!r} and {std!r}")
    if leave_one_out and mean == "none":
        raise ValueError('expected leave_one_out=False with mean="none": without a mean there is nothing to leave out')
    if not epsilon >= 0:
        raise ValueError(f"expected epsilon >= 0, got {epsilon}")


def normalised(
    scores: Float[Tensor, " B"],
    groups: Int[Tensor, " B"],
    rewarded: Bool[Tensor, " B"],
    *,
    mean: Level = "group",
    std: Level = "group",
    leave_one_out: bool = False,
    unbiased: bool = True,
    epsilon: float = 1e-6,
    global_sum: GlobalSum = own_sum,
) -> Float[Tensor, " B"]:
    r"""The reward minus a mean, over a standard deviation, each of the row's group, of the whole batch, or left out.

    Group and group is GRPO, group and none Dr. GRPO, group leaving one out and none RLOO, group and batch LitePPO.

    Args:
        scores: scalar rewards, shape [B].
        groups: which prompt each row answers, shape [B].
        rewarded: the rows that take part, shape [B].
        mean: what the subtracted mean runs over.
        std: what the standard deviation runs over, around its own mean.
        leave_one_out: subtract the mean of the *other* rows, which is the deviation times n / (n - 1).
        unbiased: whether the variance divides by n - 1 instead of n.
        epsilon: added to the standard deviation.
        global_sum: adds tensors up over the ranks that share the batch.

    Raises:
        ValueError: if a level is unknown or the options do not fit together.
    """
    check_levels(mean, std, leave_one_out=leave_one_out, epsilon=epsilon)
    known = {
        "group": lambda: group_statistics(scores, groups, rewarded),
        "batch": lambda: batch_statistics(scores, rewarded, global_sum),
    }
    populations = {level: known[level]() for level in sorted({mean, std} - {"none"})}
    live, advantages = rewarded, masked_fill_invalid(scores, rewarded).double()
    for population in populations.values():
        live = live & population.spread
    if mean != "none":
        centre = populations[mean]
        advantages = advantages - centre.mean
        if leave_one_out:
            advantages = advantages * centre.number / (centre.number - 1).clamp(min=1)
    if std != "none":
        advantages = advantages / (populations[std].std(unbiased=unbiased) + epsilon)
    return torch.where(live, advantages, 0.0).to(scores.dtype)


def grpo(
    scores: Float[Tensor, " B"],
    groups: Int[Tensor, " B"],
    rewarded: Bool[Tensor, " B"],
    *,
    unbiased: bool = True,
    epsilon: float = 1e-6,
) -> Float[Tensor, " B"]:
    r"""The reward standardised within its group, :math:`(s - \bar s) / (\sigma + \epsilon)`.

    Source: Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, section 4.1.2.

    Args:
        scores: scalar rewards, shape [B].
        groups: which prompt each row answers, shape [B].
        rewarded: the rows that take part, shape [B].
        unbiased: whether the variance divides by n - 1 instead of n.
        epsilon: added to the standard deviation.

    Example:
        >>> grpo(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 1]), torch.ones(3, dtype=torch.bool))
        tensor([ 0.7071, -0.7071,  0.0000])
    """
    return normalised(scores, groups, rewarded, unbiased=unbiased, epsilon=epsilon)


def dr_grpo(
    scores: Float[Tensor, " B"], groups: Int[Tensor, " B"], rewarded: Bool[Tensor, " B"]
) -> Float[Tensor, " B"]:
    r"""The reward minus the mean of its group, :math:`s - \bar s`: a hard prompt weighs no more than an easy one.

    Source: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783.
    """
    return normalised(scores, groups, rewarded, std="none")


def rloo(scores: Float[Tensor, " B"], groups: Int[Tensor, " B"], rewarded: Bool[Tensor, " B"]) -> Float[Tensor, " B"]:
    r"""The reward minus the mean of the *other* rows of its group, :math:`(s - \bar s)\, n / (n - 1)`.

    Source: Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019.
    """
    return normalised(scores, groups, rewarded, std="none", leave_one_out=True)


def maxrl(
    scores: Float[Tensor, " B"], groups: Int[Tensor, " B"], rewarded: Bool[Tensor, " B"], *, epsilon: float = 1e-6
) -> Float[Tensor, " B"]:
    r"""The reward relative to the mean of its group, :math:`(s - \bar s) / (\bar s + \epsilon)`.

    Derived for rewards of 0 and 1, where it approximates maximum likelihood; 0 unless the mean is positive.

    Source: Tajwar et al. 2026 (MaxRL), arXiv:2602.02710, algorithm 1.

    Args:
        scores: scalar rewards, shape [B].
        groups: which prompt each row answers, shape [B].
        rewarded: the rows that take part, shape [B].
        epsilon: added to the mean.
    """
    group = group_statistics(scores, groups, rewarded)
    relative = (scores.double() - group.mean) / (group.mean.clamp(min=0) + epsilon).clamp(min=1e-300)
    return torch.where(group.spread & (group.mean > 0), relative, 0.0).to(scores.dtype)


def opo(
    scores: Float[Tensor, " B"],
    groups: Int[Tensor, " B"],
    rewarded: Bool[Tensor, " B"],
    lengths: Int[Tensor, " B"],
) -> Float[Tensor, " B"]:
    r"""The reward minus the length-weighted mean of its group, :math:`s - \sum_i l_i s_i / \sum_i l_i`.

    Source: Hao et al. 2025 (OPO), arXiv:2505.23585.

    Args:
        scores: scalar rewards, shape [B].
        groups: which prompt each row answers, shape [B].
        rewarded: the rows that take part, shape [B].
        lengths: valid tokens of each row, shape [B].
    """
    index, number = group_index(groups)
    weights = torch.where(rewarded, lengths, 0).double()
    exact = masked_fill_invalid(scores, rewarded).double()
    zeros = torch.zeros(number, dtype=torch.float64, device=scores.device)
    total = zeros.index_add(0, index, weights)
    baseline = zeros.index_add(0, index, weights * exact) / total.clamp(min=1)
    spread = group_statistics(scores, groups, rewarded).spread
    return torch.where(spread, exact - baseline[index], 0.0).to(scores.dtype)


def reinforce(
    scores: Float[Tensor, " B"], groups: Int[Tensor, " B"], rewarded: Bool[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """The reward itself, without a baseline; ``groups`` takes no part.

    Source: Williams 1992.
    """
    del groups
    return masked_fill_invalid(scores, rewarded)
