"""Rewards of whole rows: what a truncated response keeps, and what length costs in a group."""

import torch
from kit.support import rollout_of

from goldens.cases import Case, Outputs
from goldens.registry import replays
from lightning_rl import DrGRPO, FinishReason
from lightning_rl.callbacks import LinearLengthPenalty, StopProperly


@replays("stop_properly")
def stopped(case: Case) -> Outputs:
    """The reward by our correction; a negative coefficient is the reward itself."""
    coef, rewards = case.params["coef"], case["rewards"]
    finish = torch.where(case.mask("truncated"), FinishReason.LENGTH, FinishReason.STOP).to(torch.uint8)
    rollout = rollout_of(rewards.tolist(), [[1]] * len(rewards), finish=finish).replace(rewards=rewards)
    correction = StopProperly(coef) if coef >= 0 else StopProperly(reward=coef)
    return {"rewards_out": correction.replace_reward(rollout)}


@replays("grpo_linear_length_penalty")
def shortened(case: Case) -> Outputs:
    """The reward minus our penalty, centred in its group."""
    names = {"tokens": "num_output_tokens_weight", "context": "num_input_tokens_weight", "turns": "num_turns_weight"}
    correction = LinearLengthPenalty(**{ours: case.params[theirs] for ours, theirs in names.items()})
    rewards, own = case["rewards"], case["num_output_tokens"]
    rollout = rollout_of(rewards.tolist(), [[1]] * len(rewards), groups=case.ids().tolist()).replace(rewards=rewards)
    penalty = correction.penalty(rollout, own, case["num_total_tokens"] - own, case["num_turns"])
    return {"scores": DrGRPO().per_row(rewards + penalty, rollout.groups, rollout.rewarded)}
