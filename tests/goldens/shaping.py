"""Shaped rewards: penalties of whole rows, and rewards of single tokens made of a KL and a scalar."""

from typing import Any

import torch
from kit.support import rollout_of

from goldens.cases import Case, Outputs
from goldens.further_rewards import stopped
from goldens.options import ESTIMATOR_NAMES, estimator_of, first_of
from goldens.registry import choose, replays, without_effect
from lightning_rl import FinishReason, Rollout
from lightning_rl.callbacks import AdaptiveKL, NoEOSMask, OverlongPenalty
from lightning_rl.signal.masked import masked_fill_invalid, row_mean
from lightning_rl.signal.shaped_rewards import shaped_rewards


@replays("reward_shaping/*")
def overlong(case: Case) -> Outputs:
    """The reward plus the bonus of our correction."""
    params = case.params
    if "coef" in params:  # NeMo-RL has one function for both
        return stopped(case)
    correction = OverlongPenalty(
        params["max_response_length"], params["overlong_buffer_len"], coef=params.get("penalty_factor", 1.0)
    )
    rewards = case["rewards"]
    lengths = case.ids("response_lengths")
    drawn = torch.arange(int(lengths.max())) < lengths[:, None]
    rollout = rollout_of([0.0] * len(rewards), drawn.tolist())
    return {"rewards_out": rewards + correction.reward_bonus(rollout).to(rewards.dtype)}


@replays("reward_shaping/apply_overlong_filtering")
def filtered(case: Case) -> Outputs:
    """The mask without the rows that did not stop by themselves."""
    mask = case.mask()
    finish = torch.where(case.mask("stopped"), FinishReason.STOP, FinishReason.LENGTH).to(torch.uint8)
    excluded = NoEOSMask("drop_tokens").exclude(_rows(len(mask), finish=finish))
    return {"mask_out": mask & ~excluded[:, None]}


def _rows(number: int, **given: Any) -> Rollout:
    return rollout_of([0.0] * number, [[1]] * number, **given)


@replays("token_rewards/*")
def shaped_with_kl(case: Case) -> Outputs:
    """The reward of each token minus a KL, and a scalar at the last valid token."""
    params = case.params
    old, reference = case["old_logp"], case["ref_logp"]
    mask = case.mask() if "mask" in case else torch.ones_like(old, dtype=torch.bool)
    coefficient = first_of(params, ("kl_coef", "kl_ratio"), 0.0)
    if case.peer in ("OpenRLHF", "SkyRL"):
        coefficient = max(coefficient, 0.0)
    kl = masked_fill_invalid(estimator_of(case, first_of(params, ESTIMATOR_NAMES, "k1"))(old, reference), mask)
    tokens = -coefficient * kl
    scores = old.new_zeros(len(old))
    if "token_scores" in case:
        tokens = tokens + case["token_scores"]
    if "rewards" in case:
        scores = case["rewards"].clamp(*(params.get("reward_clip_range") or (-torch.inf, torch.inf)))
    found = {
        "token_rewards": shaped_rewards(scores, tokens, mask),
        "mean_kl": row_mean(kl, mask).mean(),
        "max_kl": kl.abs().amax(-1).mean(),
    }
    changed = coefficient
    if choose(case, "controller", {"adaptive": True, "fixed": False, None: False}):
        controller = AdaptiveKL(coefficient, target=params["target_kl"], horizon=params["horizon"])
        controller.adapt(float(found["mean_kl"]), len(old))
        changed = controller.beta
    else:
        without_effect(case, "target_kl", "horizon")
    found["new_kl_coef"] = torch.tensor(changed)
    return found
