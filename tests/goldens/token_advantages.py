"""Advantages of single tokens: returns, GAE and the pipelines around them, on the time steps that a peer counts."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from goldens.cases import Case, Outputs
from goldens.layouts import by_episode
from goldens.options import ESTIMATOR_NAMES, estimator_of, first_of, peer_of
from goldens.outcome import per_token, signal_of
from goldens.registry import NotOfferedError, replays
from lightning_rl import RLOO, DrGRPO, Normalized
from lightning_rl.signal.masked import masked_fill_invalid, whiten
from lightning_rl.signal.returns import discounted_returns, gae
from lightning_rl.signal.rewards import shaped_rewards


def decays(case: Case) -> dict[str, Any]:
    """Discount and trace decay."""
    params = case.params
    return {
        "gamma": first_of(params, ("gamma", "gae_gamma", "discount", "disc"), 1.0),
        "lam": first_of(params, ("lam", "lambd", "gae_lambda"), 1.0),
    }


def every(case: Case, name: str = "token_rewards") -> Tensor:
    """All positions as time steps."""
    return torch.ones_like(case[name], dtype=torch.bool)


@replays("advantages_token/discounted_returns")
def returns(case: Case) -> Outputs:
    """Returns of a peer to whom a masked position is a time step without reward."""
    rewards = case["token_rewards"]
    if "mask" in case:
        rewards = masked_fill_invalid(rewards, case.mask())
    return {"returns": discounted_returns(rewards, every(case), gamma=decays(case)["gamma"])}


@replays("advantages_token/gae")
def estimated(case: Case) -> Outputs:
    """GAE: verl, NeMo-RL and AReaL pass through masked positions, the others take them for time steps."""
    if "rewards" in case:
        return _nemo_gae(case)
    rewards, values = case["token_rewards"], case["values"]
    if "no_eos" in case:
        return _areal_gae(rewards, values, case.mask(), case.mask("no_eos"), decays(case))
    peer = peer_of(case)
    if peer.steps == "every, masked ones empty":
        rewards, values = (masked_fill_invalid(one, case.mask()) for one in (rewards, values))
    advantages = gae(rewards, values, case.mask() if peer.steps == "valid" else every(case), **decays(case))
    whitened = whiten(advantages, case.mask()) if peer.whitened else advantages
    return {"advantages": whitened, "returns": advantages + values}


def _areal_gae(rewards: Tensor, values: Tensor, mask: Tensor, no_eos: Tensor, options: dict[str, Any]) -> Outputs:
    """The last column is no step; its value bootstraps a row that was cut off."""
    steps = mask.clone()
    steps[:, -1] = False
    advantages = gae(rewards, values, steps, bootstrap=torch.where(no_eos, values[:, -1], 0.0), **options)
    return {"advantages": advantages, "returns": advantages + values}


@replays("gae_packed")
def packed(case: Case) -> Outputs:
    """Episodes one after the other, cut behind masked positions: each ends with the first of those."""
    ends, rewards, values = case.mask("dones") | ~case.mask(), case["token_rewards"], case["values"]

    def estimate(one_rewards: Tensor, one_values: Tensor, inside: Tensor) -> Tensor:
        return gae(one_rewards, one_values, inside, **decays(case))

    advantages = by_episode(estimate, every(case), ends, rewards, values)
    return {"advantages": advantages, "returns": advantages + values}


@replays("gae_decoupled", "gae_mc_kl")
def _nemo_gae(case: Case) -> Outputs:
    """NeMo-RL: one decay for the policy and one for the critic, and a KL in the reward."""
    params, mask, values = case.params, case.mask(), case["values"]
    if params.get("length_adaptive_alpha"):
        raise NotOfferedError("a decay that depends on the length")
    shaped = shaped_rewards(case["rewards"], _kl_penalty(case), mask)
    options = decays(case)
    of_policy, of_critic = (
        gae(shaped, values, mask, gamma=options["gamma"], lam=first_of(params, (name,), options["lam"]))
        for name in ("gae_lambda_policy", "gae_lambda_value")
    )
    advantages = whiten(of_policy, mask) if params.get("normalize_advantages") else of_policy
    return {"advantages": advantages, "returns": of_critic + values}


def _kl_penalty(case: Case, name: str = "logp") -> Tensor | None:
    estimator = first_of(case.params, ESTIMATOR_NAMES)
    if estimator is None or case.params.get("use_kl_in_reward") is False:
        return None
    return -case.params.get("kl_coef", 0.0) * estimator_of(case, estimator)(case[name], case["ref_logp"])


@replays("advantages_token/reinforce_plus_plus")
def plus_plus(case: Case) -> Outputs:
    """REINFORCE++ as each peer understands its time steps."""
    if case.peer in PIPELINES:
        return PIPELINES[case.peer](case)
    rewards, mask, gamma = case["token_rewards"], case.mask(), decays(case)["gamma"]
    if peer_of(case).steps == "runs":
        found = by_episode(partial(_returns, gamma), mask, torch.zeros_like(mask), rewards)
    else:
        found = discounted_returns(rewards, mask, gamma=gamma)
    return {"advantages": whiten(found, mask), "returns": found}


def _returns(gamma: float, rewards: Tensor, inside: Tensor) -> Tensor:
    return discounted_returns(rewards, inside, gamma=gamma)


@replays(
    "advantages_token/reinforce_plus_plus_baseline",
    "advantages_token/grpo",
    "advantages_token/dr_grpo",
    "advantages_token/rloo",
    "gae_pipeline",
)
def pipelines(case: Case) -> Outputs:
    """An estimator in the middle of a peer's pipeline."""
    if case.peer not in PIPELINES:
        return per_token(case)
    return PIPELINES[case.peer](case)


def _nemo(case: Case) -> Outputs:
    """The reward, centred or not, plus each token's KL, whitened with the population's variance."""
    signal, mask = signal_of(case), case.mask()
    centred = (
        DrGRPO().per_row(signal.scores, signal.groups, signal.rewarded)
        if case.params.get("minus_baseline")
        else signal.scores
    )
    penalty = _kl_penalty(case)
    raw = signal.spread_out(centred) + (0.0 if penalty is None else penalty)
    return {"advantages": whiten(raw, mask, unbiased=False)}


def _openrlhf(case: Case) -> Outputs:
    """Normalised rewards, shaped with a KL, summed up from each token on, whitened for some."""
    params, mask, signal = case.params, case.mask(), signal_of(case)
    name = params["estimator"]
    rows: dict[str, Any] = {
        "rloo": lambda: RLOO().per_row(signal.scores, signal.groups, signal.rewarded),
        "reinforce_baseline": lambda: DrGRPO().per_row(signal.scores, signal.groups, signal.rewarded),
        "dr_grpo": lambda: DrGRPO().per_row(signal.scores, signal.groups, signal.rewarded),
        "group_norm": lambda: _group_norm(case),
    }
    scores = rows[name]() if name in rows else signal.scores
    shaped = shaped_rewards(scores, -params.get("kl_coef", 0.0) * case["kl"], mask)
    options = decays(case)
    if name == "gae":
        values = masked_fill_invalid(case["values"], mask)
        advantages = gae(shaped, values, every(case, "kl"), **options)
        found = advantages + values
    else:
        gamma = 1.0 if name in rows else options["gamma"]
        advantages = found = discounted_returns(shaped, every(case, "kl"), gamma=gamma)
    if name in ("gae", "reinforce", "reinforce_baseline"):
        advantages = whiten(advantages, mask, unbiased=False)
    return {"advantages": advantages, "returns": found}


def _group_norm(case: Case) -> Tensor:
    signal = signal_of(case)
    std = "none" if case.params.get("no_std_norm") else "group"
    return Normalized(std=std, epsilon=1e-9).per_row(signal.scores, signal.groups, signal.rewarded)


def _slime(case: Case) -> Outputs:
    """Rewards that come normalised: broadcast, or summed up from each token on; whitened over the batch."""
    params, mask = case.params, case.mask()
    inside = torch.arange(mask.shape[1]) < case.ids("lengths")[:, None]
    name = params["advantage_estimator"]
    raw = estimator_of(case, first_of(params, ESTIMATOR_NAMES, "k1"))(case["old_logp"], case["ref_logp"])
    coefficient = params.get("kl_coef", 0.0)
    kl = masked_fill_invalid(raw, inside & (coefficient != 0))  # what nobody asks for is not measured
    penalty, rewards = -coefficient * kl, case["rewards"]
    spread = rewards[:, None].expand_as(kl)
    if name == "ppo":
        values = case["values"]
        advantages = gae(shaped_rewards(rewards, penalty, inside), values, inside, **decays(case))
        found = advantages + values
    elif name == "reinforce_plus_plus":
        shaped = shaped_rewards(rewards, penalty, mask)
        advantages = found = discounted_returns(shaped, inside, gamma=decays(case)["gamma"])
    else:
        advantages = found = spread + (penalty if name == "reinforce_plus_plus_baseline" else 0.0)
    if params.get("normalize_advantages"):
        advantages = whiten(advantages, mask)
    return {"advantages": advantages, "returns": found, "kl": kl}


PIPELINES = {"NeMo-RL": _nemo, "OpenRLHF": _openrlhf, "slime": _slime}
