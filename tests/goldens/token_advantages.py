"""Advantages of single tokens: returns, GAE and the pipelines around them, on the time steps that a peer counts."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from goldens.cases import Case, Outputs
from goldens.layouts import by_episode
from goldens.options import ESTIMATOR_NAMES, estimator_of, first_of, peer_of
from goldens.outcome import signal_of
from goldens.registry import replays
from lightning_rl import RLOO, DrGRPO, Normalized
from lightning_rl.advantages import LengthAdaptive, RelativePosition
from lightning_rl.advantages.optimal_token_baseline import beyond_the_others, logit_gradients, minus_optimal_baseline
from lightning_rl.signal.discounted_returns import discounted_returns, gae, turn_gae
from lightning_rl.signal.masked import masked_fill_invalid, whiten
from lightning_rl.signal.shaped_rewards import shaped_rewards


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
    """The last column is no step; its value bootstraps a row that was truncated."""
    steps = mask.clone()
    steps[:, -1] = False
    advantages = gae(rewards, values, steps, bootstrap=torch.where(no_eos, values[:, -1], 0.0), **options)
    return {"advantages": advantages, "returns": advantages + values}


@replays("gae_vapo_length_adaptive", "gae_relative_position")
def by_length(case: Case) -> Outputs:
    """AReaL's GAE with a decay that follows the number of valid tokens."""
    params = case.params
    decay = LengthAdaptive(params["alpha"]) if "alpha" in params else RelativePosition(params["q"])
    lam = decay(case.mask().sum(-1))
    options = {"gamma": params["gamma"], "lam": lam}
    found = _areal_gae(case["token_rewards"], case["values"], case.mask(), case.mask("no_eos"), options)
    return {"gae_lambda": lam, **found}


@replays("gae_turn_level")
def over_turns(case: Case) -> Outputs:
    """AReaL's GAE over turns; the value of the last column bootstraps a row that was truncated."""
    mask, values = case.mask(), case["values"]
    bootstrap = torch.where(case.mask("no_eos"), values[:, -1], 0.0)
    found = turn_gae(case["token_rewards"], values, mask, case.ids("turn_ids"), bootstrap=bootstrap, **decays(case))
    return {"advantages": found.advantages, "returns": found.returns}


def behind_the_second(mask: Tensor, groups: Tensor) -> Tensor:
    """Verl's other form takes columns for steps: those from the length of the second longest row on."""
    found = torch.zeros_like(mask)
    for group in groups.unique():
        rows, lengths = (groups == group).nonzero()[:, 0], mask[groups == group].sum(-1)
        longest = lengths == lengths.max()
        if len(rows) > 1 and longest.sum() == 1:
            found[rows[longest], int(lengths[~longest].max()) :] = True
    return found & mask


@replays("optimal_token_baseline", "tir_optimal_token_baseline")
def optimal_baseline(case: Case) -> Outputs:
    """Ours compares the n-th sampled tokens; verl's other form compares columns, holes among them."""
    mask, signal = case.mask(), signal_of(case)
    sizes = logit_gradients(case["old_logp"], case["sum_pi_squared"])
    if "rollout_is_weights" in case:
        sizes = sizes * case["rollout_is_weights"].square()
    over_turns = case.algorithm.startswith("tir")
    steps = (mask.cumsum(-1) - 1).clamp(min=0) if over_turns else torch.arange(mask.shape[1]).expand(mask.shape)
    returns = discounted_returns(case["token_rewards"], mask)
    advantages = minus_optimal_baseline(returns, sizes, mask, signal.groups, steps)
    if case.params["handle_zero_tail"]:
        tail = beyond_the_others(mask, signal.groups, steps) if over_turns else behind_the_second(mask, signal.groups)
        advantages = torch.where(tail, returns, advantages)
    return {"advantages": advantages, "returns": returns}


@replays("gae_packed")
def packed(case: Case) -> Outputs:
    """Episodes one after the other, cut behind masked positions: each ends with the first of those."""
    ends, rewards, values = case.mask("dones") | ~case.mask(), case["token_rewards"], case["values"]

    def estimate(one_rewards: Tensor, one_values: Tensor, inside: Tensor) -> Tensor:
        return gae(one_rewards, one_values, inside, **decays(case))

    advantages = by_episode(estimate, every(case), ends, rewards, values)
    return {"advantages": advantages, "returns": advantages + values}


@replays("gae_decoupled", "gae_mc_kl", "gae_length_adaptive")
def _nemo_gae(case: Case) -> Outputs:
    """NeMo-RL: one decay for the policy and one for the critic, and a KL in the reward."""
    params, mask, values = case.params, case.mask(), case["values"]
    shaped = shaped_rewards(case["rewards"], _kl_penalty(case), mask)
    options = decays(case)
    adaptive = params.get("length_adaptive_alpha")
    lam = (
        LengthAdaptive(adaptive)(mask.sum(-1)) if adaptive else first_of(params, ("gae_lambda_policy",), options["lam"])
    )
    of_policy = gae(shaped, values, mask, gamma=options["gamma"], lam=lam)
    of_critic = gae(
        shaped, values, mask, gamma=options["gamma"], lam=first_of(params, ("gae_lambda_value",), options["lam"])
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


@replays("advantages_token/*")
def pipelines(case: Case) -> Outputs:
    """An estimator in the middle of a peer's pipeline."""
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
        "group_norm": lambda: Normalized(epsilon=1e-9).per_row(
            signal.scores, signal.groups, signal.rewarded
        ),  # independent of no_std_norm
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


def _slime(case: Case) -> Outputs:
    """Rewards that come normalised: broadcast, or summed up from each token on; whitened over the batch."""
    params, mask = case.params, case.mask()
    inside = torch.arange(mask.shape[1]) < case.ids("lengths")[:, None]
    name = params["advantage_estimator"]
    raw = estimator_of(case, first_of(params, ESTIMATOR_NAMES, "k1"))(case["old_logp"], case["ref_logp"])
    coefficient = params.get("kl_coef", 0.0)
    kl = masked_fill_invalid(raw, inside & (coefficient != 0))  # measured only with a coefficient
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
