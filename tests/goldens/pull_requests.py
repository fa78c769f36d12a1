"""The cases that record a pull request."""

from typing import Any

import torch
from kit.support import rollout_of, run_step, view_of
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from goldens.cases import Case, Outputs
from goldens.corrections import opsm_of
from goldens.layouts import carried_back, prediction_aligned
from goldens.normalization import group_sizes, rewards_normalised
from goldens.options import estimator_of, peer_ratio
from goldens.policy_options import clip_of
from goldens.registry import choose, replays, without_effect
from goldens.views import gradient, view_of_case
from lightning_rl import FinishReason
from lightning_rl.callbacks import NoEOSMask, OffPolicyIS
from lightning_rl.losses import ClippedSurrogate, PolicyLoss, Reinforce
from lightning_rl.signal.discounted_returns import discounted_returns, gae
from lightning_rl.signal.masked import masked_fill_invalid
from lightning_rl.signal.reductions import sequence_mean
from lightning_rl.signal.shaped_rewards import shaped_rewards

PPO = ClippedSurrogate(clip_low=0.2, clip_high=0.2)  # what the record says of its base


def unpacked(case: Case) -> dict[str, Tensor]:
    """Every packed input as padded rows, and which positions are inside."""
    lengths = case.ids("response_lengths").tolist()
    packed = [name for name, array in case.arrays.items() if array.shape == (sum(lengths),) and name != "rewards"]
    rows = {name: pad_sequence(list(case[name].split(lengths)), batch_first=True) for name in packed}
    return {**rows, "inside": torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]}


@replays("pr_cases/compute_opsm_mask")
def opsm(case: Case) -> Outputs:
    """OPSM on PPO's surrogate, each sequence decided as a whole."""
    rows = unpacked(case)
    view = view_of(rows["logp"], valid=rows["mask"], old_logprobs=rows["old_logp"], advantages=rows["adv"])
    loss, correction = ClippedSurrogate(**clip_of(case)), opsm_of(case.params["opsm_delta"])
    kept = correction.sequence_mask(view)
    tokens = loss(view) * kept[:, None]
    step = run_step(view, callbacks=[correction], loss=loss, reduction=sequence_mean)
    inside = rows["inside"]
    return {
        "opsm_mask": kept[:, None].expand_as(inside)[inside],
        "opsm_clipfrac": (~kept).sum().to(tokens.dtype),
        "masked_policy_pg_loss_tokens": tokens[inside],
        "reduced_policy_loss": step.loss * len(kept),
    }


@replays("pr_cases/compute_cispo_loss", "pr_cases/compute_policy_loss")
def off_policy_is(case: Case) -> Outputs:
    """A detached weight of current over rollout on a base loss."""
    view = view_of_case(case)
    low, high = case.params["weight_low"], case.params["weight_high"]
    without_effect(case, "eps_clip", "eps_clip_high")  # the bounds of the weight by another name
    bases: dict[str, PolicyLoss] = {"reinforce": Reinforce(), "ppo": PPO}
    base = choose(case, "base_loss", bases)
    weight = OffPolicyIS(low, high).token_weight(view)
    ratio = peer_ratio(case, view.logprobs.detach(), view.require("rollout_logprobs"))
    tokens = base(view) * weight
    total = masked_fill_invalid(tokens, view.valid_tokens).sum()
    return {
        "is_weight": weight,
        "ratio": ratio,
        "clipped": weight != ratio,
        "abs_dev": (ratio - 1).abs(),
        "per_token_loss": tokens,
        "masked_sum": total,
        "grad_logp": gradient(total, view.logprobs),
    }


@replays("pr_cases/compute_advantages_and_returns")
def raw_kl(case: Case) -> Outputs:
    """The KL as it was measured, and the advantages of the reward that it shapes."""
    rows, params = unpacked(case), case.params
    inside = rows["inside"]
    kl = estimator_of(case, params["kl_loss_type"])(rows["logp"], rows["ref_logp"])
    shaped = shaped_rewards(case["rewards"], -params["kl_coef"] * kl, inside)
    advantages = gae(shaped, rows["values"], inside, gamma=params["gamma"], lam=params["lambd"])
    found = {"kl": kl, "advantages": advantages, "returns": advantages + rows["values"]}
    return {name: value[inside] for name, value in found.items()}


@replays("pr_cases/_compute_advantages")
def no_eos(case: Case) -> Outputs:
    """A row that was truncated gets no reward, and enters no statistic of the reward."""
    without_effect(case, "kl_ctl")  # log-probabilities are 0
    found: Outputs = {}
    for run in ("baseline", "outlier"):
        shaped, advantages = _without_truncated(case, case[f"{run}_rewards"])
        found |= {f"tot_rewards_{run}": shaped, f"advantages_{run}": advantages}
    return {**found, "advantage_diff": found["advantages_outlier"] - found["advantages_baseline"]}


def _without_truncated(case: Case, rewards: Tensor) -> tuple[Tensor, Tensor]:
    attention, mask = case.mask("attention_mask"), prediction_aligned(case.mask("loss_mask"))
    finish = torch.where(attention.all(-1), FinishReason.LENGTH, FinishReason.STOP).to(torch.uint8)
    rollout = rollout_of([0.0] * len(mask), [[1]] * len(mask), finish=finish)
    rewarded = NoEOSMask().reward_mask(rollout) if case.params["mask_no_eos_with_zero"] else rollout.rewarded
    norm: dict[str, Any] = case.params.get("reward_norm") or {}
    sizes = torch.tensor(group_sizes(norm, len(mask)))
    groups = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    scores = rewards_normalised(rewards, groups, rewarded, norm)
    shaped = shaped_rewards(scores, None, mask)
    advantages = discounted_returns(shaped, mask, gamma=case.params["discount"] * case.params["gae_lambda"])
    return shaped, carried_back(advantages, mask)
