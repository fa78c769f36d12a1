"""From a peer's parameters to a loss object of ours."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kit.losses import with_bound
from torch import Tensor

from goldens.cases import Case
from goldens.corrections import SMALLEST, Contribution, corrections_of
from goldens.options import first_of, peer_of
from lightning_rl import LossView, PolicyLoss
from lightning_rl.losses import (
    CISPO,
    DPPO,
    GMPO,
    GSPO,
    SAPO,
    ClipCov,
    ClippedSurrogate,
    FunctionLoss,
    KLCov,
    Reinforce,
)
from lightning_rl.signal.importance_ratios import LOG_RATIO_BOUND, sequence_log_ratio

LOW = (
    "eps_clip_low",
    "clip_ratio_low",
    "clip_eps_low",
    "epsilon_low",
    "ratio_clip_min",
    "clip_lower",
    "cispo_eps_clip_low",
    "eps_clip",
    "cliprange",
    "clip_low",
)
HIGH = (
    "eps_clip_high",
    "eps_clip_higher",
    "clip_ratio_high",
    "clip_eps_high",
    "epsilon_high",
    "ratio_clip_max",
    "clip_higher",
    "cispo_eps_clip_high",
    "clip_high",
)
DUAL = ("clip_ratio_c", "eps_clip_c", "c_clip", "ratio_clip_c", "dual_clip", "delta")


def clip_of(case: Case) -> dict[str, Any]:
    """The two bounds of a clipped ratio; a peer that gives one means both."""
    low = first_of(case.params, LOW, 0.2)
    return {"clip_low": min(low, 1.0), "clip_high": first_of(case.params, HIGH, low)}  # no ratio is below 0


def dual_clip_of(case: Case) -> dict[str, Any]:
    """The bounds with a dual clip. TRL's cap is on the unclipped ratio, for either sign of the advantage.

    Beyond the upper bound of the clip it only binds where a dual clip does; below, the two change places.
    """
    clip, cap = clip_of(case), first_of(case.params, DUAL)
    if first_of(case.params, ("delta",)) is None or cap > 1 + clip["clip_high"]:
        return {**clip, "dual_clip": cap}
    return {**clip, "clip_high": max(cap - 1, 0.0), "dual_clip": 1 + clip["clip_high"]}


def by_sequence(case: Case) -> bool:
    """Return True if a case has one ratio per row."""
    params = case.params
    levels = params.get("importance_sampling_level"), params.get("level"), params.get("policy_loss_type")
    return bool({"sequence", "sequence_token", "gspo"} & set(levels) or params.get("sequence_level_importance_ratios"))


def surrogate(case: Case) -> PolicyLoss:
    """PPO's surrogate, or GSPO's."""
    if by_sequence(case):
        return per_sequence(case)
    return ClippedSurrogate(**dual_clip_of(case))


def per_sequence(case: Case) -> PolicyLoss:
    """GSPO: verl and SkyRL give every token its own gradient, the others differentiate the mean."""
    per_token = peer_of(case).gspo_per_token or case.params.get("importance_sampling_level") == "sequence_token"
    clip = dual_clip_of(case)
    return GSPO(clip_low=clip["clip_low"], clip_high=clip["clip_high"], per_token=per_token)


def clipped_weight_loss(case: Case) -> PolicyLoss:
    """CISPO: open-instruct and TRL have no lower bound, and TRL's upper bound is the weight itself."""
    clip = clip_of(case)
    if not peer_of(case).cispo_floor:
        clip["clip_low"] = 1.0
    clip["clip_high"] += peer_of(case).cispo_offset - 1
    return CISPO(**clip, anchor=case.params.get("cispo_anchor", "old"))


def temperatures(case: Case) -> dict[str, float]:
    """SAPO's two temperatures."""
    names = {"tau_positive": ("tau_pos", "sapo_temperature_pos"), "tau_negative": ("tau_neg", "sapo_temperature_neg")}
    given = {ours: first_of(case.params, theirs) for ours, theirs in names.items()}
    return {ours: value for ours, value in given.items() if value is not None}


def m2_threshold(case: Case) -> float:
    """M2PO's bound on the second moment."""
    return max(case.params["m2_threshold"], SMALLEST)


def trust_region(case: Case) -> PolicyLoss:
    """DPPO: verl has the score-function form with a cap."""
    names = {"low": ("delta_low", "dppo_mask_low"), "high": ("delta_high", "dppo_mask_high")}
    bounds = {ours: first_of(case.params, theirs, 0.2) for ours, theirs in names.items()}
    return DPPO(
        divergence="kl" if "kl" in str(case.params.get("dppo_type", case.algorithm)).split("_") else "tv",
        cap=first_of(case.params, ("ratio_cap",)),
        **bounds,
    )


def drawn(case: Case) -> PolicyLoss:
    """Clip-Cov."""
    names = {"fraction": ("clip_cov_ratio", "clip_ratio"), "cov_low": ("clip_cov_lb",), "cov_high": ("clip_cov_ub",)}
    given = {ours: first_of(case.params, theirs) for ours, theirs in names.items()}
    return ClipCov(**clip_of(case), **{ours: value for ours, value in given.items() if value is not None})


def penalised(case: Case) -> PolicyLoss:
    """KL-Cov."""
    names = {"fraction": ("kl_cov_ratio", "kl_cov_frac"), "coef": ("ppo_kl_coef",)}
    given = {ours: first_of(case.params, theirs) for ours, theirs in names.items()}
    return KLCov(**{ours: value for ours, value in given.items() if value is not None})


LOSSES: Mapping[str, Callable[[Case], PolicyLoss]] = {
    "gspo": per_sequence,
    "gspo_token": per_sequence,
    "gspo_dual": per_sequence,
    "tis_sequence_gspo": per_sequence,
    "cispo": clipped_weight_loss,
    "cispo_rollout_anchor": clipped_weight_loss,
    "cispo_decoupled": clipped_weight_loss,
    "dppo_binary_tv": trust_region,
    "dppo_binary_kl": trust_region,
    "clip_cov": drawn,
    "kl_cov": penalised,
    "gmpo": lambda case: GMPO(**clip_of(case)),
    "sapo": lambda case: SAPO(**temperatures(case)),
    "reinforce": lambda _case: Reinforce(),
    "policy_loss/gpg": lambda _case: Reinforce(),
    "cross_entropy": lambda _case: Reinforce(),
    "importance_sampling": lambda _case: ClippedSurrogate(clip_low=1.0, clip_high=math.inf),
    "rollout_is": lambda _case: Reinforce(),
}
"""Our loss for a peer's algorithm; corrections around a loss that is not named here are around PPO's surrogate."""


def loss_of(case: Case) -> PolicyLoss:
    """The loss object for a case."""
    return LOSSES.get(f"{case.topic}/{case.algorithm}", LOSSES.get(case.algorithm, surrogate))(case)


def bounded(case: Case, loss: PolicyLoss) -> PolicyLoss:
    """The same loss with the bound that the peer puts on the log-ratio before exp, where that is not ours."""
    peer = peer_of(case)
    if isinstance(loss, GSPO):
        cap = dual_clip_of(case)["dual_clip"]
        capped = replace(loss, dual_clip=cap)
        return FunctionLoss(lambda view: _gspo(averaged(case, view), capped, peer.sequence_log_ratio))
    if peer.log_ratio != LOG_RATIO_BOUND and isinstance(loss, DPPO | ClippedSurrogate) and not loss.prepares:
        return with_bound(loss, peer.log_ratio)
    return loss


def averaged(case: Case, view: LossView) -> LossView:
    """The tokens that a mean over a row is of: AReaL leaves those out that its corrections mask."""
    if not peer_of(case).mean_advantage:
        return view
    return view.replace(valid_tokens=view.valid_tokens & Contribution(view, corrections_of(case)).kept)


def _gspo(view: LossView, loss: GSPO, bound: float) -> Tensor:
    """The peers' bound is on one side only, so that it is ours where no row goes beyond."""
    old = view.require("old_logprobs")
    beyond = sequence_log_ratio(view.logprobs.detach(), old, view.valid_tokens, geometric=True).max() > bound
    return with_bound(loss, bound if beyond or bound == math.inf else LOG_RATIO_BOUND)(view)
