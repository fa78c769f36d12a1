"""Rewards of whole rows: what a truncated response keeps, and what length costs in a group."""

import torch
from kit.support import rollout_of

from goldens.cases import Case, Outputs
from goldens.registry import only, replays
from lightning_rl import DrGRPO, FinishReason
from lightning_rl.callbacks import LinearLengthPenalty, StopProperly


@replays("reward_shaping/apply_stop_properly_penalty")
def stopped(case: Case) -> Outputs:
    """The reward by our correction; a negative coefficient is the reward itself."""
    coef, rewards = case.params["coef"], case["rewards"]
    finish = torch.where(case.mask("truncated"), FinishReason.LENGTH, FinishReason.STOP).to(torch.uint8)
    rollout = rollout_of(rewards.tolist(), [[1]] * len(rewards), finish=finish).replace(rewards=rewards)
    correction = StopProperly(coef) if coef >= 0 else StopProperly(reward=coef)
    return {"rewards_out": correction.replace_reward(rollout)}


@replays("advantages_outcome/GRPOAlgorithm")
def shortened(case: Case) -> Outputs:
    """prime-rl: the reward minus our penalty, which is 0 without a weight, centred in its group."""
    only(case, length_penalty=())
    names = {"tokens": "num_output_tokens_weight", "context": "num_input_tokens_weight", "turns": "num_turns_weight"}
    weights = {ours: case.params.get(theirs) or 0.0 for ours, theirs in names.items()}
    scores, groups = case["rewards"], case.ids()
    rewarded = torch.ones_like(groups, dtype=torch.bool)
    if any(weights.values()):
        own = case["num_output_tokens"]
        rollout = rollout_of(scores.tolist(), [[1]] * len(scores), groups=groups.tolist()).replace(rewards=scores)
        context, turns = case["num_total_tokens"] - own, case["num_turns"]
        scores = scores + LinearLengthPenalty(**weights).penalty(rollout, own, context, turns)
    return {"scores": DrGRPO().per_row(scores, groups, rewarded)}
