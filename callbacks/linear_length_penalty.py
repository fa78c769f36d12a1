r"""Linear length penalty: of the responses to a prompt that the policy solves, the longer ones get less.

.. math::
    p_b = -\bar s_g \Bigl(c_{\text{tok}} \frac{n_b}{\max_{b' \in g} n_{b'}}
    + c_{\text{ctx}} \frac{m_b}{\max_{b' \in g} m_{b'}}
    + c_{\text{turn}} \frac{k_b}{\max_{b' \in g} k_{b'}}\Bigr)

with :math:`n` the tokens that the policy sampled, :math:`m` all others (the prompt and what tools returned), :math:`k`
the turns, and :math:`\bar s_g` the mean reward of the group, over its rewarded rows as the maxima are: a prompt that is
always solved is pressed the most, one that never is not at all. The penalty is added to the task reward before any
normalisation. Meant for rewards of at least 0; a group with a negative mean would be paid for length.

Source: prime-rl 2026, the linear length penalty of its group-relative algorithms.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.arguments import check_numbers
from lightning_rl.corrections import RLCallback, Stat
from lightning_rl.rollout import Rollout
from lightning_rl.signal.masked import group_index, masked_fill_invalid


class LinearLengthPenalty(RLCallback):
    """Punishes length relative to the longest response of the group, as much as the group succeeds.

    Logs ``linear_length_penalty/penalty``, the mean of what is added to a response that has a reward.

    Args:
        tokens: coefficient of the tokens that the policy sampled.
        context: coefficient of the tokens of the prompt and of tools.
        turns: coefficient of the turns, uninterrupted runs of sampled tokens.

    Raises:
        ValueError: if a coefficient is negative or infinite.
    """

    name = "linear_length_penalty"
    compares_rows = True
    compares_groups = True
    scales_rewards = True

    def __init__(self, tokens: float = 0.25, *, context: float = 0.0, turns: float = 0.0) -> None:
        check_numbers(at_least=0, finite=True, tokens=tokens, context=context, turns=turns)
        self.tokens = tokens
        self.context = context
        self.turns = turns

    @override
    def reward_bonus(self, rollout: Rollout) -> Float[Tensor, " B"]:
        sampled = rollout.action_mask
        own = sampled.sum(-1)
        starts = sampled & ~torch.nn.functional.pad(sampled, (1, 0))[:, :-1]
        others = rollout.prompt_lengths + rollout.response_lengths - own
        return self.penalty(rollout, own, others, starts.sum(-1))

    def penalty(self, rollout: Rollout, tokens: Tensor, context: Tensor, turns: Tensor) -> Float[Tensor, " B"]:
        """What is added to each row's reward, given its tokens, those of others, and its turns, each of shape [B]."""
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
