"""Advantages of whole rows, through the estimator objects that ``advantages=`` accepts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from goldens.cases import Case, Outputs
from goldens.normalization import std_of_others
from goldens.options import first_of, peer_of
from goldens.registry import NotOfferedError, choose, only, replays, without_effect
from lightning_rl.advantages import ESTIMATORS, GPG, RLOO, Estimator, MaxRL, Normalized, PassAtK, RewardSignal
from lightning_rl.signal.kl import k1
from lightning_rl.signal.masked import masked_fill_invalid, whiten
from lightning_rl.signal.shaped_rewards import shaped_rewards


def signal_of(case: Case) -> RewardSignal:
    """The rewards of a case, however it writes them down, as what an estimator sees."""
    scores, rewarded = _scores(case)
    mask = case.mask() if "mask" in case else torch.ones(len(scores), 1, dtype=torch.bool)
    none = torch.zeros(mask.shape, dtype=scores.dtype)
    return RewardSignal(
        scores=masked_fill_invalid(scores, rewarded),
        rewarded=rewarded,
        groups=case.ids() if "group" in case else torch.arange(len(scores)),
        valid_tokens=mask,
        token_rewards=none,
        shaped=shaped_rewards(scores, None, mask),
    )


def _scores(case: Case) -> tuple[Tensor, Tensor]:
    if "rewards_per_func" in case:
        parts = case["rewards_per_func"]
        known = ~parts.isnan()
        weights = torch.tensor(case.params.get("reward_weights") or [1.0] * parts.shape[-1], dtype=parts.dtype)
        return (torch.where(known, parts, 0.0) * weights).sum(-1), known.any(-1)
    scores = case["rewards"] if "rewards" in case else case["token_rewards"].sum(-1)
    return scores, torch.ones(len(scores), dtype=torch.bool)


def normalised(case: Case, *, scaled: bool = True, std: Any = "group") -> Normalized:
    """Return GRPO, or Dr.GRPO, with the peer's epsilon and variance."""
    peer = peer_of(case)
    epsilon = case.params.get("epsilon", peer.epsilon)
    return Normalized(std=std if scaled else "none", epsilon=epsilon, unbiased=peer.unbiased)


def _grpo(case: Case) -> Estimator:
    scaled = first_of(case.params, ("norm_adv_by_std_in_grpo", "grpo_norm_by_std"))
    return normalised(case, scaled=scaled is not False)


def _open_instruct(case: Case) -> Estimator:
    scaled = choose(case, "advantage_normalization_type", {"standard": True, "centered": False})
    return normalised(case, scaled=scaled)


def _trl(case: Case) -> Estimator:
    std = choose(case, "scale_rewards", {"group": "group", "batch": "batch", "none": "none"}, default="group")
    return normalised(case, std=std)


def _slime(case: Case) -> Estimator:
    """The rewards that some estimators start from, before corrections and whitening."""
    normal = case.params.get("rewards_normalization", True)
    kinds = {
        **dict.fromkeys(
            ("grpo", "gspo", "cispo"), normalised(case, scaled=case.params.get("grpo_std_normalization", True))
        ),
        "reinforce_plus_plus_baseline": ESTIMATORS["dr_grpo"],
        **dict.fromkeys(("ppo", "reinforce_plus_plus"), Normalized(mean="none", std="none")),
    }
    found = choose(case, "advantage_estimator", kinds)
    return found if normal else Normalized(mean="none", std="none")


def _gpg(case: Case) -> Estimator:
    without_effect(case, "epsilon", "alpha")
    return GPG(teaches="nonzero")


def _without_epsilon(name: str) -> Callable[[Case], Estimator]:
    def make(case: Case) -> Estimator:
        without_effect(case, "epsilon")
        return ESTIMATORS[name]

    return make


MAKERS: dict[str, Callable[[Case], Estimator]] = {
    "compute_grpo_outcome_advantage": _grpo,
    "compute_grpo_vectorized_outcome_advantage": _grpo,
    "compute_grpo_passk_outcome_advantage": lambda case: PassAtK(
        scaled=case.params.get("norm_adv_by_std_in_grpo", True), epsilon=case.params.get("epsilon", 1e-6)
    ),
    "compute_gpg_outcome_advantage": _gpg,
    "compute_rloo_outcome_advantage": _without_epsilon("rloo"),
    "compute_rloo_vectorized_outcome_advantage": _without_epsilon("rloo"),
    "compute_opo_outcome_advantage": _without_epsilon("opo"),
    "compute_reinforce_plus_plus_baseline_outcome_advantage": _without_epsilon("reinforce_plus_plus_baseline"),
    "compute_maxrl_advantage": lambda case: MaxRL(epsilon=case.params.get("epsilon", 1e-6)),
    "MaxRLAlgorithm": lambda _case: MaxRL(epsilon=0.0),
    "GRPOTrainer": _trl,
    "_post_process_rewards": _slime,
    "data_loader": _open_instruct,
}
"""By the peer's function or class."""


@replays("advantages_outcome/*")
def outcome(case: Case) -> Outputs:
    """An estimator at every token, or as one number for each row."""
    if case.params.get("multi_objective_aggregation") == "normalize_then_sum":
        return decoupled(case)
    only(case, multi_objective_aggregation=("sum_then_normalize",), length_penalty=())
    without_effect(case, "num_generations", "n_samples_per_prompt")  # the groups are an input
    makers = [make for name, make in MAKERS.items() if case.calls(name)]
    if not makers:
        raise NotOfferedError(f"function={case.function!r}")
    signal = signal_of(case)
    return shown(case, signal, makers[0](case)(signal).advantages / case.params.get("f_norm", 1.0))


def shown(case: Case, signal: RewardSignal, found: Tensor) -> Outputs:
    """Advantages in the shapes that cases record: of tokens, or of rows."""
    if "token_rewards" in case or ("mask" in case and not peer_of(case).row_advantages):
        return {"advantages": found, "returns": found}
    rows = torch.where(signal.valid_tokens, found, -torch.inf).amax(-1)
    return {"advantages": rows, "scores": torch.where(signal.valid_tokens.any(-1), rows, 0.0)}


@replays("advantages_outcome/compute_remax_outcome_advantage")
def remax(case: Case) -> Outputs:
    """The reward minus that of a greedy answer."""
    signal = replace(signal_of(case), greedy=case["reward_baselines"])
    found = ESTIMATORS["remax"](signal).advantages
    return {"advantages": found, "returns": found + signal.spread_out(case["reward_baselines"])}


@replays("advantages_outcome/RawRewardAdvantageEstimator")
def raw(case: Case) -> Outputs:
    """The reward itself, whitened with the population's variance if the case says so."""
    signal = signal_of(case)
    found = ESTIMATORS["reinforce"](signal).advantages
    if case.params.get("normalize_advantages"):
        found = whiten(found, signal.valid_tokens, unbiased=False)
    return {"advantages": found}


@replays("advantages_outcome/GRPOAdvantageEstimator")
def nemo(case: Case) -> Outputs:
    """NeMo-RL: the mean and the deviation of the group, or of the other rows."""
    signal = signal_of(case)
    return {"advantages": signal.spread_out(_nemo_rows(case, signal.scores, signal.groups, signal.rewarded))}


def _nemo_rows(case: Case, scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
    scaled, epsilon = case.params.get("normalize_rewards", True), peer_of(case).epsilon
    if not case.params.get("use_leave_one_out_baseline", True):
        return normalised(case, scaled=scaled).per_row(scores, groups, rewarded)
    rows, std = RLOO().per_row(scores, groups, rewarded), std_of_others(scores, groups, rewarded)
    return torch.where(std > 0, rows / (std + epsilon), rows) if scaled else rows


@replays("advantages_outcome/RLOOTrainer")
def rloo_with_kl(case: Case) -> Outputs:
    """TRL: the KL of a whole row comes off its reward, and the batch is normalised last."""
    without_effect(case, "num_generations")
    signal, params = signal_of(case), case.params
    scores = signal.scores
    if params.get("beta"):
        kl = masked_fill_invalid(k1(case["old_logp"], case["ref_logp"]), signal.valid_tokens).sum(-1)
        scores = scores - params["beta"] * kl
    rows = RLOO().per_row(scores, signal.groups, signal.rewarded)
    if params.get("normalize_advantages"):
        normalized = Normalized(mean="batch", std="batch", epsilon=peer_of(case).epsilon)
        rows = normalized.per_row(rows, signal.groups, signal.rewarded)
    return {"advantages": rows}


@replays("advantages_outcome/compute_gdpo_outcome_advantage", "advantages_outcome/GDPOAdvantageEstimator")
def decoupled(case: Case) -> Outputs:
    """Each reward normalised in its group, summed with weights, and normalised over the batch, or over its tokens."""
    without_effect(case, "num_generations", "scale_rewards")
    parts, weights = _parts(case)
    groups, total = case.ids(), torch.zeros(len(case.ids()), dtype=parts[0].dtype)
    for values, weight in zip(parts, weights, strict=True):
        total = total + weight * _decoupled_rows(case, values, groups)
    if "attention_mask" in case:
        mask = case.mask("attention_mask")[:, case.params["prompt_length"] :]
        return {"advantages": whiten(total[:, None].expand(mask.shape), mask)}
    whole = torch.ones_like(groups, dtype=torch.bool)
    last = first_of({"last": peer_of(case).gdpo_epsilon}, ("last",), peer_of(case).epsilon)
    return {"advantages": Normalized(mean="batch", std="batch", epsilon=last).per_row(total, groups, whole)}


def _decoupled_rows(case: Case, values: Tensor, groups: Tensor) -> Tensor:
    if case.peer == "NeMo-RL":
        return _nemo_rows(case, values, groups, ~values.isnan())
    scaled = case.params.get("norm_adv_by_std_in_grpo", True)
    return normalised(case, scaled=scaled).per_row(values, groups, ~values.isnan())


def _parts(case: Case) -> tuple[list[Tensor], list[float]]:
    if "rewards_per_func" in case:
        parts = list(case["rewards_per_func"].T)
        return parts, case.params.get("reward_weights") or [1.0] * len(parts)
    named = case.params.get("gdpo_reward_keys")
    names = [f"reward_{key}" for key in named] if named else sorted(n for n in case.arrays if n.startswith("reward_"))
    weights = case.params.get("reward_weights") or case.params.get("gdpo_reward_weights")
    return [case[name] for name in names], weights or [1.0] * len(names)
