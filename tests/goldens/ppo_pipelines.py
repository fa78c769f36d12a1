"""PPO's advantages from raw log-probabilities, rewards and values, in the layouts of AReaL, slime and TRL."""

import torch
from torch import Tensor

from goldens.cases import Case, Outputs
from goldens.layouts import prediction_aligned
from goldens.normalization import group_sizes, rewards_normalised, tokens_normalised
from goldens.options import ESTIMATOR_NAMES, estimator_of, first_of
from goldens.registry import replays
from goldens.token_advantages import decays
from lightning_rl.signal.discounted_returns import gae
from lightning_rl.signal.masked import masked_fill_invalid, whiten
from lightning_rl.signal.shaped_rewards import shaped_rewards

NO_LOGPROB = 1.0  # what TRL puts at padding


@replays("advantages_token/_compute_advantages")
def areal(case: Case) -> Outputs:
    """Everything at the position that predicts a token; no-EOS rows bootstrap from their last value."""
    params, attention = case.params, case.mask("attention_mask")
    mask = prediction_aligned(case.mask("loss_mask"))
    no_eos = attention.all(-1)
    logprobs = masked_fill_invalid(prediction_aligned(case["logprobs"]), mask)
    reference = masked_fill_invalid(case["ref_logp"], mask)
    kl = estimator_of(case, first_of(params, ESTIMATOR_NAMES, "k1"))(logprobs, reference)
    penalty = -params.get("kl_ctl", 0.0) * kl
    shaped = shaped_rewards(_areal_scores(case, no_eos), penalty, mask)
    values = case["values"]
    advantages = gae(shaped, values, mask, bootstrap=torch.where(no_eos, values[:, -1], 0.0), **decays(case))
    returns = advantages + values
    if params.get("adv_norm"):
        advantages = tokens_normalised(advantages, mask, params["adv_norm"])
    return {
        "advantages": advantages,
        "returns": returns,
        "kl_rewards": penalty,
        "tot_rewards": shaped,
        "loss_mask_shifted": mask.to(logprobs.dtype),
        "logprobs_shifted": logprobs,
    }


def _areal_scores(case: Case, no_eos: Tensor) -> Tensor:
    params = case.params
    scores = (case["rewards"] + params.get("bias", 0.0)) * params.get("scaling", 1.0)
    bound = params.get("clip", torch.inf)
    scores = scores.clamp(-bound, bound)
    norm = params.get("reward_norm")
    if norm:
        sizes = torch.tensor(group_sizes(norm, len(scores)))
        groups = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        scores = rewards_normalised(scores, groups, torch.ones_like(no_eos), norm)
    return torch.where(no_eos, 0.0, scores) if params.get("mask_no_eos") else scores


@replays("advantages_token/PPOTrainer")
def trl(case: Case) -> Outputs:
    """The scalar one position behind the last token, where there is room; a KL at every position up to there."""
    params, last = case.params, case.ids("sequence_lengths")
    logprobs, reference, values = case["logp"], case["ref_logp"], case["values"]
    places = torch.arange(logprobs.shape[1])
    inside, with_end = places <= last[:, None], places <= last[:, None] + 1
    logprobs, reference = (masked_fill_invalid(one, inside, NO_LOGPROB) for one in (logprobs, reference))
    values = masked_fill_invalid(values, with_end)
    estimator = estimator_of(case, first_of(params, ESTIMATOR_NAMES, "k1"))
    penalty = -params.get("kl_coef", 0.0) * estimator(logprobs, reference)
    rewards = shaped_rewards(case["scores"], penalty, with_end)
    if params.get("whiten_rewards"):
        rewards = whiten(rewards, with_end, shifted=False)
    advantages = gae(rewards, values, torch.ones_like(inside), **decays(case))
    return {
        "token_rewards": rewards,
        "non_score_reward": penalty,
        "returns": advantages + values,
        "advantages": whiten(advantages, inside),
    }
