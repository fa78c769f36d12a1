"""Advantages of whole rows, through the estimator objects that ``advantages=`` accepts."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from goldens.cases import Case, Outputs
from goldens.normalization import std_of_others
from goldens.options import peer_of
from goldens.registry import replays
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


def group_normalised(case: Case) -> Estimator:
    """GRPO with the peer's epsilon and variance; TRL can take the deviation of the batch."""
    peer = peer_of(case)
    std = "batch" if case.params.get("scale_rewards") == "batch" else "group"
    return Normalized(std=std, epsilon=case.params.get("epsilon", peer.epsilon), unbiased=peer.unbiased)


MAKERS: dict[str, Callable[[Case], Estimator]] = {
    "grpo": group_normalised,
    "grpo_batch_std": group_normalised,
    "grpo_passk": lambda case: PassAtK(scaled=case.params["norm_adv_by_std_in_grpo"], epsilon=case.params["epsilon"]),
    "gpg": lambda _case: GPG(teaches="nonzero"),
    "reinforce_plus_plus_baseline_rewards": lambda _case: ESTIMATORS["dr_grpo"],  # before they are whitened
    "maxrl": lambda case: MaxRL(epsilon=case.params.get("epsilon", 0.0)),
}


def per_token(case: Case) -> Outputs:
    """An estimator by the name of the algorithm, at every token, or as one number for each row."""
    signal = signal_of(case)
    found = MAKERS.get(case.algorithm, lambda case: ESTIMATORS[case.algorithm])(case)(signal).advantages
    return shown(case, signal, found)


def shown(case: Case, signal: RewardSignal, found: Tensor) -> Outputs:
    """Advantages in the shapes that cases record: of tokens, or of rows."""
    if "token_rewards" in case or ("mask" in case and not peer_of(case).row_advantages):
        return {"advantages": found, "returns": found}
    rows = torch.where(signal.valid_tokens, found, -torch.inf).amax(-1)
    return {"advantages": rows, "scores": torch.where(signal.valid_tokens.any(-1), rows, 0.0)}


@replays("advantages_outcome/*")
def outcome(case: Case) -> Outputs:
    """A named estimator."""
    if "beta" in case.params:
        return _rloo_with_kl(case)
    return per_token(case)


@replays("advantages_outcome/remax")
def remax(case: Case) -> Outputs:
    """The reward minus that of a greedy answer."""
    signal = replace(signal_of(case), greedy=case["reward_baselines"])
    found = ESTIMATORS["remax"](signal).advantages
    return {"advantages": found, "returns": found + signal.spread_out(case["reward_baselines"])}


@replays("raw_reward")
def raw(case: Case) -> Outputs:
    """The reward itself, whitened with the population's variance if the case says so."""
    signal = signal_of(case)
    found = ESTIMATORS["reinforce"](signal).advantages
    if case.params.get("normalize_advantages"):
        found = whiten(found, signal.valid_tokens, unbiased=False)
    return {"advantages": found}


@replays("grpo_leave_one_out")
def leave_one_out(case: Case) -> Outputs:
    """RLOO over the deviation of the other rows, where they have one."""
    signal = signal_of(case)
    rows = _leave_one_out(signal.scores, signal.groups, signal.rewarded, peer_of(case).epsilon)
    return {"advantages": signal.spread_out(rows)}


def _leave_one_out(scores: Tensor, groups: Tensor, rewarded: Tensor, epsilon: float) -> Tensor:
    rows, std = RLOO().per_row(scores, groups, rewarded), std_of_others(scores, groups, rewarded)
    return torch.where(std > 0, rows / (std + epsilon), rows)


def _rloo_with_kl(case: Case) -> Outputs:
    """TRL: the KL of a whole row comes off its reward, and the batch is normalised last."""
    signal, params = signal_of(case), case.params
    kl = masked_fill_invalid(k1(case["old_logp"], case["ref_logp"]), signal.valid_tokens).sum(-1)
    rows = RLOO().per_row(signal.scores - params["beta"] * kl, signal.groups, signal.rewarded)
    if params.get("normalize_advantages"):
        normalized = Normalized(mean="batch", std="batch", epsilon=peer_of(case).epsilon)
        rows = normalized.per_row(rows, signal.groups, signal.rewarded)
    return {"advantages": rows}


@replays("gdpo")
def decoupled(case: Case) -> Outputs:
    """Each reward normalised in its group, summed with weights, and normalised over the batch, or over its tokens."""
    parts, weights = _parts(case)
    groups = case.ids()
    epsilon = case.params.get("epsilon", peer_of(case).epsilon)
    scaled = case.params.get("norm_adv_by_std_in_grpo", True) and case.params.get("normalize_rewards", True)
    std = "group" if scaled else "none"
    total = torch.zeros(len(groups), dtype=parts[0].dtype)
    for values, weight in zip(parts, weights, strict=True):
        known = ~values.isnan()
        if case.params.get("use_leave_one_out_baseline"):
            rows = _leave_one_out(values, groups, known, epsilon)
        else:
            rows = Normalized(std=std, epsilon=epsilon).per_row(values, groups, known)
        total = total + weight * rows
    if "attention_mask" in case:
        mask = case.mask("attention_mask")[:, case.params["prompt_length"] :]
        return {"advantages": whiten(total[:, None].expand(mask.shape), mask)}
    whole = torch.ones_like(groups, dtype=torch.bool)
    last = peer_of(case).gdpo_epsilon
    normalized = Normalized(mean="batch", std="batch", epsilon=epsilon if last is None else last)
    return {"advantages": normalized.per_row(total, groups, whole)}


def _parts(case: Case) -> tuple[list[Tensor], list[float]]:
    if "rewards_per_func" in case:
        parts = list(case["rewards_per_func"].T)
        return parts, case.params.get("reward_weights") or [1.0] * len(parts)
    names = [name for name in case.arrays if name.startswith("reward_")]
    weights = case.params.get("reward_weights") or case.params.get("gdpo_reward_weights")
    return [case[name] for name in names], weights or [1.0] * len(names)
