"""Advantage estimators: how much better a response, or a token, did than expected.

The group estimators take one scalar for each row and return one for each row. A row outside ``rewarded`` enters no
statistic and gets 0, and so does a group of one or a group whose rewards are all equal (by test, not by an epsilon).
Statistics are float64, two passes.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rl.signal.masked import group_index, masked_fill_invalid


class GroupStatistics(NamedTuple):
    """Each row's group, summed up over its rewarded rows; every field has shape [B]."""

    scores: Float[Tensor, " B"]  # float64, 0 outside the population
    number: Float[Tensor, " B"]  # of rewarded rows
    mean: Float[Tensor, " B"]
    std: Float[Tensor, " B"]  # unbiased; 0 for fewer than two rows
    spread: Bool[Tensor, " B"]  # the row is rewarded and its group has different rewards


def group_statistics(
    scores: Float[Tensor, " B"], groups: Int[Tensor, " B"], rewarded: Bool[Tensor, " B"]
) -> GroupStatistics:
    """Count, mean and standard deviation of each row's group over the rewarded rows alone."""
    index, number = group_index(groups)
    exact = masked_fill_invalid(scores, rewarded).double()

    def per_group(values: Tensor) -> Tensor:
        return torch.zeros(number, dtype=torch.float64, device=values.device).index_add_(0, index, values)[index]

    def extreme(fill: float, reduce: str) -> Tensor:
        start = torch.full((number,), fill, dtype=torch.float64, device=exact.device)
        return start.scatter_reduce_(0, index, torch.where(rewarded, exact, fill), reduce)[index]

    count = per_group(rewarded.double())
    mean = per_group(exact) / count.clamp(min=1)
    deviation = torch.where(rewarded, exact - mean, 0.0)
    std = (per_group(deviation.square()) / (count - 1).clamp(min=1)).sqrt()
    spread = rewarded & ~(extreme(-torch.inf, "amax") <= extreme(torch.inf, "amin"))  # NaN has spread: never hide it
    return GroupStatistics(exact, count, mean, std, spread)


def grpo(
    scores: Float[Tensor, " B"], groups: Int[Tensor, " B"], rewarded: Bool[Tensor, " B"], *, epsilon: float = 1e-6
) -> Float[Tensor, " B"]:
    r"""The reward standardised within its group, :math:`(s - \bar s) / (\sigma + \epsilon)` with the unbiased sigma.

    Source: Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, section 4.1.2.

    Args:
        scores: scalar rewards, shape [B].
        groups: which prompt each row answers, shape [B].
        rewarded: the rows that take part, shape [B].
        epsilon: added to the standard deviation.

    Example:
        >>> grpo(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 1]), torch.ones(3, dtype=torch.bool))
        tensor([ 0.7071, -0.7071,  0.0000])
    """
    group = group_statistics(scores, groups, rewarded)
    return torch.where(group.spread, (group.scores - group.mean) / (group.std + epsilon), 0.0).to(scores.dtype)


def rloo(scores: Float[Tensor, " B"], groups: Int[Tensor, " B"], rewarded: Bool[Tensor, " B"]) -> Float[Tensor, " B"]:
    r"""The reward minus the mean of the *other* rows of its group, :math:`(s - \bar s)\, n / (n - 1)`.

    Source: Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019.

    Args:
        scores: scalar rewards, shape [B].
        groups: which prompt each row answers, shape [B].
        rewarded: the rows that take part, shape [B].
    """
    group = group_statistics(scores, groups, rewarded)
    factor = group.number / (group.number - 1).clamp(min=1)
    return torch.where(group.spread, (group.scores - group.mean) * factor, 0.0).to(scores.dtype)


def reinforce(
    scores: Float[Tensor, " B"], groups: Int[Tensor, " B"], rewarded: Bool[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """The reward itself, without a baseline; ``groups`` takes no part.

    Source: Williams 1992.
    """
    del groups
    return masked_fill_invalid(scores, rewarded)


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    valid_tokens: Bool[Tensor, "B T"],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Float[Tensor, "B T"]:
    r"""Generalised advantage estimation along the valid tokens of each row.

    .. math:: \delta_t = r_t + \gamma V_{t+1} - V_t, \qquad A_t = \delta_t + \gamma\lambda A_{t+1}

    A masked token is no time step: value and running sum pass through it undiscounted, and its own advantage is 0. The
    value after the last valid token is 0. The returns are ``advantages + values``.

    Source: Schulman et al. 2015, arXiv:1506.02438, eq. 16.

    Args:
        rewards: shaped reward of each token, shape [B, T].
        values: the critic's value before each token, shape [B, T].
        valid_tokens: the time steps, shape [B, T].
        gamma: discount of a step, in [0, 1].
        lam: decay of later temporal differences, in [0, 1].

    Raises:
        ValueError: if ``gamma`` or ``lam`` leaves [0, 1].
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"expected gamma and lam in [0, 1], got {gamma} and {lam}")
    rewards, values = masked_fill_invalid(rewards, valid_tokens), masked_fill_invalid(values, valid_tokens)
    advantages = torch.zeros_like(values)
    following, running = values.new_zeros(len(values)), values.new_zeros(len(values))
    for step in reversed(range(values.shape[1])):
        valid = valid_tokens[:, step]
        delta = rewards[:, step] + gamma * following - values[:, step]
        running = torch.where(valid, delta + gamma * lam * running, running)
        following = torch.where(valid, values[:, step], following)
        advantages[:, step] = torch.where(valid, running, 0.0)
    return advantages
