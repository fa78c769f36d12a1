r"""Linear length penalty: penalize long responses in proportion to the mean reward of their group.

.. math::
    p_b = -\bar s_g \Bigl(c_{\text{tok}} \frac{n_b}{\max_{b' \in g} n_{b'}}
    + c_{\text{ctx}} \frac{m_b}{\max_{b' \in g} m_{b'}}
    + c_{\text{turn}} \frac{k_b}{\max_{b' \in g} k_{b'}}\Bigr)

with :math:`n` the number of sampled tokens, :math:`m` the number of other tokens (prompt and tool outputs), :math:`k`
the number of turns, and :math:`\bar s_g` the mean reward of the group. Mean and maxima run over the rewarded rows. The
penalty is added to the task reward before normalization. Requires rewards of at least 0: in a group with a negative
mean, longer responses would gain reward. A reward below 0 ends the run.

Source: prime-rl 2026, the linear length penalty of its group-relative algorithms.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import RLCallback, Stat
from lightning_rl.rollout import Rollout
from lightning_rl.signal.masked import group_index, masked_fill_invalid
from lightning_rl.signal.reward_domain import RewardDomain
from lightning_rl.utils.arguments import check_numbers


class LinearLengthPenalty(RLCallback):
    """Penalty on length relative to the longest response of the group.

    Logs ``linear_length_penalty/penalty``, the mean penalty of the rewarded responses.

    Args:
        tokens: Coefficient of the number of sampled tokens.
        context: Coefficient of the number of prompt and tool tokens.
        turns: Coefficient of the number of turns, which are contiguous runs of sampled tokens.

    Raises:
        ValueError: If a coefficient is negative or infinite.
    """

    name = "linear_length_penalty"
    compares_rows = True
    compares_groups = True
    scales_rewards = True

    def __init__(self, tokens: float = 0.25, *, context: float = 0.0, turns: float = 0.0) -> None:
        check_numbers(at_least=0, finite=True, tokens=tokens, context=context, turns=turns)
        if tokens or context or turns:
            self.domain = RewardDomain(0.0, "add a constant to the rewards, so that the smallest is 0")
        self.tokens = tokens
        self.context = context
        self.turns = turns

    @override
    def reward_bonus(self, rollout: Rollout) -> Float[Tensor, " B"]:
        sampled = rollout.action_mask
        tokens = sampled.sum(-1)
        starts = sampled & ~torch.nn.functional.pad(sampled, (1, 0))[:, :-1]
        context = rollout.prompt_lengths + rollout.response_lengths - tokens
        return self.penalty(rollout, tokens, context, starts.sum(-1))

    def penalty(self, rollout: Rollout, tokens: Tensor, context: Tensor, turns: Tensor) -> Float[Tensor, " B"]:
        """Return the penalty of each row from its sampled tokens, other tokens and turns, each of shape [B]."""
        index, groups = group_index(torch.where(rollout.rewarded, rollout.groups, -1))
        zeros = torch.zeros(groups, dtype=torch.float64, device=rollout.rewards.device)
        number = zeros.index_add(0, index, rollout.rewarded.double()).clamp(min=1)
        total = zeros.index_add(0, index, masked_fill_invalid(rollout.rewards, rollout.rewarded).double())
        costs = torch.zeros_like(index, dtype=torch.float64)
        for coef, amount in ((self.tokens, tokens), (self.context, context), (self.turns, turns)):
            largest = zeros.scatter_reduce(0, index, amount.double(), "amax").clamp(min=1)
            costs = costs + coef * amount / largest[index]
        penalty = torch.where(rollout.rewarded, -(total / number)[index] * costs, 0.0)
        return penalty.to(rollout.rewards.dtype)

    @override
    def rollout_metrics(self, rollout: Rollout) -> dict[str, Stat]:
        return {"linear_length_penalty/penalty": Stat.of(self.reward_bonus(rollout), rollout.rewarded)}
