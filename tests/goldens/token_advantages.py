"""Advantages of single tokens: returns, GAE and the pipelines around them, on the time steps that a peer counts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from goldens.cases import Case, Outputs
from goldens.layouts import by_episode
from goldens.options import ESTIMATOR_NAMES, estimator_of, first_of, peer_of
from goldens.outcome import signal_of
from goldens.registry import choose, only, replays, without_effect
from lightning_rl import RLOO, DrGRPO, Normalized
from lightning_rl.advantages import LengthAdaptive, RelativePosition, RowEstimator
from lightning_rl.advantages.optimal_token_baseline import beyond_the_others, logit_gradients, minus_optimal_baseline
from lightning_rl.signal.discounted_returns import discounted_returns, gae, turn_gae
from lightning_rl.signal.masked import global_moments, masked_fill_invalid, whiten
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


@replays("advantages_token/get_cumulative_returns", "advantages_token/chunked_discounted_returns")
def returns(case: Case) -> Outputs:
    """Returns of a peer to whom a masked position is a time step without reward."""
    without_effect(case, "chunk_size")
    rewards = case["token_rewards"]
    if "mask" in case:
        rewards = masked_fill_invalid(rewards, case.mask())
    return {"returns": discounted_returns(rewards, every(case), gamma=decays(case)["gamma"])}


@replays(
    "advantages_token/calculate_advantages",
    "advantages_token/chunked_gae",
    "advantages_token/compute_gae_advantage_return",
    "advantages_token/get_advantages_and_returns",
    "advantages_token/vanilla_gae",
)
def estimated(case: Case) -> Outputs:
    """GAE: verl passes through masked positions, the others take them for time steps."""
    without_effect(case, "chunk_size")
    rewards, values, peer = case["token_rewards"], case["values"], peer_of(case)
    if peer.steps == "every, masked ones empty":
        rewards, values = (masked_fill_invalid(one, case.mask()) for one in (rewards, values))
    advantages = gae(rewards, values, case.mask() if peer.steps == "valid" else every(case), **decays(case))
    whitened = whiten(advantages, case.mask()) if peer.whitened else advantages
    return {"advantages": whitened, "returns": advantages + values}


@replays("advantages_token/_compute_token_level_gae")
def areal_gae(case: Case) -> Outputs:
    """AReaL: the last column is no step; its value bootstraps a row that was truncated.

    The decay can follow the number of valid tokens.
    """
    params, mask, values = case.params, case.mask(), case["values"]
    options, steps = decays(case), case.mask()
    adaptive = {"alpha": LengthAdaptive, "q": RelativePosition}
    for name, decay in adaptive.items():
        if params.get(name) is not None:
            options["lam"] = decay(params[name])(mask.sum(-1))
    steps[:, -1] = False
    bootstrap = torch.where(case.mask("no_eos"), values[:, -1], 0.0)
    advantages = gae(case["token_rewards"], values, steps, bootstrap=bootstrap, **options)
    found = {"advantages": advantages, "returns": advantages + values}
    return {**found, "gae_lambda": options["lam"]} if isinstance(options["lam"], Tensor) else found


@replays("advantages_token/_compute_turn_level_gae")
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


@replays(
    "advantages_token/compute_optimal_token_baseline_advantage",
    "advantages_token/compute_multi_turn_optimal_token_baseline_advantage",
)
def optimal_baseline(case: Case) -> Outputs:
    """Ours compares the n-th sampled tokens; verl's other form compares columns, holes among them."""
    mask, signal = case.mask(), signal_of(case)
    sizes = logit_gradients(case["old_logp"], case["sum_pi_squared"])
    if "rollout_is_weights" in case:
        sizes = sizes * case["rollout_is_weights"].square()
    over_turns = case.calls("compute_multi_turn_optimal_token_baseline_advantage")
    only(case, epsilon=(1e-8,))
    steps = (mask.cumsum(-1) - 1).clamp(min=0) if over_turns else torch.arange(mask.shape[1]).expand(mask.shape)
    returns = discounted_returns(case["token_rewards"], mask)
    advantages = minus_optimal_baseline(returns, sizes, mask, signal.groups, steps)
    if case.params["handle_zero_tail"]:
        tail = beyond_the_others(mask, signal.groups, steps) if over_turns else behind_the_second(mask, signal.groups)
        advantages = torch.where(tail, returns, advantages)
    return {"advantages": advantages, "returns": returns}


@replays("advantages_token/calculate_advantages_packed")
def packed(case: Case) -> Outputs:
    """Episodes one after the other, cut behind masked positions: each ends with the first of those."""
    ends, rewards, values = case.mask("dones") | ~case.mask(), case["token_rewards"], case["values"]

    def estimate(one_rewards: Tensor, one_values: Tensor, inside: Tensor) -> Tensor:
        return gae(one_rewards, one_values, inside, **decays(case))

    advantages = by_episode(estimate, every(case), ends, rewards, values)
    return {"advantages": advantages, "returns": advantages + values}


@replays("advantages_token/GeneralizedAdvantageEstimator")
def nemo_gae(case: Case) -> Outputs:
    """NeMo-RL: one decay for the policy and one for the critic, and a KL in the reward."""
    params, mask, values = case.params, case.mask(), case["values"]
    shaped = shaped_rewards(case["rewards"], _kl_penalty(case), mask)
    gamma, lam = (decays(case)[name] for name in ("gamma", "lam"))
    lam_policy, lam_value = (first_of(params, (f"gae_lambda_{name}",), lam) for name in ("policy", "value"))
    if params.get("length_adaptive_alpha"):
        lam_policy = LengthAdaptive(params["length_adaptive_alpha"])(mask.sum(-1))
    of_policy = gae(shaped, values, mask, gamma=gamma, lam=lam_policy)
    of_critic = gae(shaped, values, mask, gamma=gamma, lam=lam_value)
    advantages = whiten(of_policy, mask) if params.get("normalize_advantages") else of_policy
    return {"advantages": advantages, "returns": of_critic + values}


def _kl_penalty(case: Case, name: str = "logp") -> Tensor | None:
    estimator, used = first_of(case.params, ESTIMATOR_NAMES), case.params.get("use_kl_in_reward", True)
    if estimator is None or not used:
        without_effect(case, "kl_coef")
        return None
    return -case.params.get("kl_coef", 0.0) * estimator_of(case, estimator)(case[name], case["ref_logp"])


@replays("advantages_token/compute_reinforce_plus_plus_outcome_advantage")
def plus_plus(case: Case) -> Outputs:
    """REINFORCE++ as verl and SkyRL understand their time steps."""
    rewards, mask, gamma = case["token_rewards"], case.mask(), decays(case)["gamma"]
    if peer_of(case).steps == "runs":
        found = by_episode(partial(_returns, gamma), mask, torch.zeros_like(mask), rewards)
    else:
        found = discounted_returns(rewards, mask, gamma=gamma)
    return {"advantages": whiten(found, mask), "returns": found}


def _returns(gamma: float, rewards: Tensor, inside: Tensor) -> Tensor:
    return discounted_returns(rewards, inside, gamma=gamma)


@replays("advantages_token/ReinforcePlusPlusAdvantageEstimator")
def nemo_plus_plus(case: Case) -> Outputs:
    """The reward, centred or not, plus each token's KL, whitened with the population's variance."""
    signal, mask = signal_of(case), case.mask()
    mean = "group" if case.params.get("minus_baseline", True) else "none"
    centred = Normalized(mean=mean, std="none").per_row(signal.scores, signal.groups, signal.rewarded)
    penalty = _kl_penalty(case)
    raw = signal.spread_out(centred) + (0.0 if penalty is None else penalty)
    return {"advantages": whiten(raw, mask, unbiased=False)}


@replays("advantages_token/compute_advantages_and_returns")
def pipeline(case: Case) -> Outputs:
    """An estimator in the middle of a peer's pipeline."""
    return {"OpenRLHF": _openrlhf, "slime": _slime}[case.peer](case)


def _openrlhf(case: Case) -> Outputs:
    """Normalised rewards, shaped with a KL, summed up from each token on, whitened for some."""
    params, mask, signal = case.params, case.mask(), signal_of(case)
    without_effect(case, "n_samples_per_prompt")  # the groups are an input
    plain = Normalized(mean="none", std="none")
    kinds: dict[str, tuple[RowEstimator, bool]] = {  # with whether the advantages are whitened
        "gae": (plain, True),
        "reinforce": (plain, True),
        "reinforce_baseline": (DrGRPO(), True),
        "rloo": (RLOO(), False),
        "dr_grpo": (DrGRPO(), False),
        "group_norm": (Normalized(epsilon=peer_of(case).epsilon), False),
    }
    estimator, whitened = choose(case, "estimator", kinds)
    scores = estimator.per_row(signal.scores, signal.groups, signal.rewarded)
    scores = scores.clamp(*(params.get("reward_clip_range") or (-torch.inf, torch.inf)))
    shaped = shaped_rewards(scores, -max(params.get("kl_coef", 0.0), 0.0) * case["kl"], mask)
    options, steps = decays(case), every(case, "kl")
    if params["estimator"] == "gae":
        values = masked_fill_invalid(case["values"], mask)
        advantages = gae(shaped, values, steps, **options)
        found = advantages + values
    else:
        discounted = params["estimator"] == "reinforce"  # the others take no discount
        advantages = found = discounted_returns(shaped, steps, gamma=options["gamma"] if discounted else 1.0)
    centred = bool(params.get("no_std_norm"))
    if whitened:
        advantages = _centred(advantages, mask) if centred else whiten(advantages, mask, unbiased=False)
    return {"advantages": advantages, "returns": found}


def _centred(values: Tensor, mask: Tensor) -> Tensor:
    return global_moments(values, mask).deviation.to(values.dtype)


def _slime(case: Case) -> Outputs:
    """Rewards that come normalised: broadcast, or summed up from each token on; whitened over the batch."""
    params, mask = case.params, case.mask()
    inside = torch.arange(mask.shape[1]) < case.ids("lengths")[:, None]
    raw = estimator_of(case, first_of(params, ESTIMATOR_NAMES, "k1"))(case["old_logp"], case["ref_logp"])
    coefficient, options = params.get("kl_coef", 0.0), decays(case)
    kl = masked_fill_invalid(raw, inside & (coefficient != 0))  # measured only with a coefficient
    penalty, rewards = -coefficient * kl, case["rewards"]
    spread = rewards[:, None].expand_as(kl)
    kinds: dict[str, Callable[[], Tensor]] = {
        "ppo": lambda: gae(shaped_rewards(rewards, penalty, inside), case["values"], inside, **options),
        "reinforce_plus_plus": lambda: discounted_returns(
            shaped_rewards(rewards, penalty, mask), inside, gamma=options["gamma"]
        ),
        "reinforce_plus_plus_baseline": lambda: spread + penalty,
        **dict.fromkeys(("grpo", "gspo", "cispo"), lambda: spread),
    }
    advantages = choose(case, "advantage_estimator", kinds)()
    found = advantages + case["values"] if params["advantage_estimator"] == "ppo" else advantages
    if params.get("normalize_advantages"):
        advantages = whiten(advantages, mask)
    return {"advantages": advantages, "returns": found, "kl": kl}
