"""From a peer's parameters to a loss object of ours."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from kit.losses import with_bound
from torch import Tensor
from typing_extensions import override

from goldens.cases import Case
from goldens.corrections import SMALLEST, Contribution, corrections_of
from goldens.options import first_of, peer_of
from goldens.registry import NotOfferedError, choose, only, without_effect
from lightning_rl import LossView, PolicyLoss
from lightning_rl.losses import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GSPO,
    SAPO,
    VESPO,
    ClipCov,
    ClippedSurrogate,
    FunctionLoss,
    KLCov,
    Reinforce,
)
from lightning_rl.signal.importance_ratios import (
    LOG_RATIO_BOUND,
    clipped_weight,
    policy_ratio,
    sequence_log_ratio,
)

LOW = (
    "cispo_eps_clip_low",
    "eps_clip_low",
    "clip_ratio_low",
    "clip_eps_low",
    "epsilon_low",
    "ratio_clip_min",
    "clip_lower",
    "eps_clip",
    "cliprange",
    "clip_low",
)
HIGH = (
    "cispo_eps_clip_high",
    "eps_clip_high",
    "eps_clip_higher",
    "clip_ratio_high",
    "clip_eps_high",
    "epsilon_high",
    "ratio_clip_max",
    "clip_higher",
    "clip_high",
)
DUAL = ("eps_clip_c", "c_clip", "ratio_clip_c", "dual_clip", "delta")
DUAL_CLIP = 3.0  # of verl and SkyRL where a call does not pass one

KINDS: Mapping[str, str] = {
    "cispo_loss_fn": "cispo",
    "compute_cispo_loss": "cispo",
    "compute_policy_loss_cispo": "cispo",
    "sapo_loss_fn": "sapo",
    "sapo_policy_loss": "sapo",
    "compute_policy_loss_sapo": "sapo",
    "compute_gspo_kl": "gspo",
    "compute_policy_loss_gspo": "gspo",
    "gspo_policy_loss": "gspo",
    "compute_policy_loss_dppo_kl": "dppo",
    "compute_policy_loss_dppo_tv": "dppo",
    "dppo_policy_loss": "dppo",
    "compute_policy_loss_clip_cov": "clip_cov",
    "compute_policy_loss_kl_cov": "kl_cov",
    "compute_policy_loss_geo_mean": "gmpo",
    "GMPOTrainer": "gmpo",
    "RLOOTrainer": "product",
    "compute_policy_loss_dro": "dro",
    "ce_loss_fn": "cross_entropy",
    "cross_entropy_loss": "cross_entropy",
    "compute_policy_loss_gpg": "reinforce",
    "compute_policy_loss_reinforce": "reinforce",
    "compute_policy_loss_bypass_mode": "ppo",
    "compute_policy_loss_vanilla": "ppo",
    "rollout_is_policy_loss": "rollout_is",
    "importance_sampling_loss": "unclipped",
}
"""Our loss for a function of a peer that computes one loss."""

SWITCHES: Mapping[str, Mapping[str, str]] = {
    "loss_type": {
        **dict.fromkeys(("grpo", "bnpo", "dr_grpo", "dapo", "luspo"), "ppo"),
        **{name: name for name in ("cispo", "sapo", "vespo")},
    },
    "policy_loss_type": {"regular": "ppo", "dual_clip": "ppo", "ppo": "ppo", "gspo": "gspo"},
    "loss_fn": {"dapo": "ppo", "cispo": "cispo"},
    "advantage_estimator": {
        **{name: name for name in ("gspo", "cispo")},
        **dict.fromkeys(("grpo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"), "ppo"),
    },
}
"""Our loss for a value of the parameter that switches between the losses of a peer's function."""


def kind_of(case: Case) -> str:
    """Return our name of the loss of a case, from the peer's function or the parameter that switches its loss."""
    named = [kind for function, kind in KINDS.items() if case.calls(function)]
    if named:
        without_effect(case, "loss_type", "policy_loss_type")
        return named[0]
    without_ratio, forced = (case.params.get(name) for name in ("disable_ppo_ratio", "force_on_policy_ratio"))
    if case.params.get("use_cispo"):
        return "cispo"
    if without_ratio and not forced:
        return "reinforce"
    switch = next((name for name in SWITCHES if name in case.params), None)
    return "ppo" if switch is None else choose(case, switch, SWITCHES[switch])


def clip_of(case: Case) -> dict[str, Any]:
    """Return the two bounds of a clipped ratio; a peer that gives one means both."""
    names = (LOW, HIGH) if kind_of(case) == "cispo" else (LOW[1:], HIGH[1:])
    both = ("clip_ratio",) if case.peer == "verl" else ()
    low = first_of(case.params, (*names[0], *both), 0.2)
    high = first_of(case.params, (*names[1], *both), low)
    if kind_of(case) == "gmpo":  # bounds of a log-ratio
        return {"clip_low": low, "clip_high": high}
    return {"clip_low": min(low, 1.0), "clip_high": high}  # no ratio is below 0


def dual_of(case: Case) -> float | None:
    """Return the cap of the ratio of tokens with negative advantage."""
    if case.peer not in ("verl", "SkyRL"):
        return first_of(case.params, DUAL)
    cap = case.params.get("clip_ratio_c", DUAL_CLIP)
    switched = case.params.get("policy_loss_type") == "dual_clip"
    return cap if switched or case.calls("compute_policy_loss_vanilla", "compute_policy_loss_bypass_mode") else None


def dual_clip_of(case: Case) -> dict[str, Any]:
    """Return the bounds with a dual clip. TRL's cap is on the unclipped ratio, for either sign of the advantage.

    Beyond the upper bound of the clip it only binds where a dual clip does; below, the two change places.
    """
    clip, cap = clip_of(case), dual_of(case)
    if case.peer != "trl" or cap is None or cap > 1 + clip["clip_high"]:
        return {**clip, "dual_clip": cap}
    if cap <= 1:
        raise NotOfferedError(f"delta={cap!r}")
    return {**clip, "clip_high": cap - 1, "dual_clip": 1 + clip["clip_high"]}


def by_sequence(case: Case) -> bool:
    """Return True if a case has one ratio per row."""
    params = case.params
    levels = {"token": False, "sequence": True, "sequence_token": True, None: False}
    by_level = [choose(case, name, levels) for name in ("importance_sampling_level", "level")]
    return any(by_level) or bool(params.get("sequence_level_importance_ratios")) or kind_of(case) == "gspo"


def surrogate(case: Case) -> PolicyLoss:
    """Return PPO's surrogate, or GSPO's."""
    return per_sequence(case) if by_sequence(case) else ClippedSurrogate(**dual_clip_of(case))


def per_sequence(case: Case) -> PolicyLoss:
    """Return GSPO: verl and SkyRL give every token its own gradient, the others differentiate the mean."""
    per_token = peer_of(case).gspo_per_token or case.params.get("importance_sampling_level") == "sequence_token"
    return GSPO(**dual_clip_of(case), per_token=per_token, anchor="rollout" if on_the_rollout(case) else "old")


def on_the_rollout(case: Case) -> bool:
    """Return True if OpenRLHF's GSPO compares with the engine's policy, which takes the place of other corrections."""
    return case.peer == "OpenRLHF" and kind_of(case) == "gspo" and bool(case.params.get("enable_vllm_is_correction"))


@dataclass(frozen=True, kw_only=True)
class OneRatioPerRow(FunctionLoss):
    """Loss of tokens on the ratio of their row.

    Args:
        function: Loss of a view whose log-probabilities are log-ratios of rows, and whose old ones are 0.
        geometric: Take the mean of a row's log-ratios instead of the sum.
    """

    geometric: bool = True

    @override
    def __call__(self, view: LossView) -> Tensor:
        old = view.require("old_logprobs")
        ratio = sequence_log_ratio(view.logprobs, old, view.valid_tokens, geometric=self.geometric)
        ratios = ratio[:, None].expand_as(old)
        return self.function(view.replace(logprobs=ratios, old_logprobs=torch.zeros_like(ratios)))


def clipped_weight_loss(case: Case) -> PolicyLoss:
    """Return CISPO: open-instruct and TRL have no lower bound, and TRL's upper bound is the weight itself."""
    clip = clip_of(case)
    if not peer_of(case).cispo_floor:
        clip["clip_low"] = 1.0
    clip["clip_high"] += peer_of(case).cispo_offset - 1
    if by_sequence(case):
        return FunctionLoss(lambda view: _light(view, 1 + clip["clip_high"], by_row=True))
    if clip["clip_high"] < 0:  # a weight that never gets to 1
        return FunctionLoss(lambda view: _light(view, 1 + clip["clip_high"], by_row=False))
    return CISPO(**clip, anchor=choose(case, "cispo_anchor", {"old": "old", "rollout": "rollout"}, default="old"))


def _light(view: LossView, cap: float, *, by_row: bool) -> Tensor:
    old = view.require("old_logprobs")
    if not by_row:
        return clipped_weight(view.logprobs, old, minimum=0.0, maximum=cap) * Reinforce()(view)
    ratio = sequence_log_ratio(view.logprobs.detach(), old, view.valid_tokens, geometric=True)[:, None]
    return policy_ratio(ratio, torch.zeros_like(ratio)).clamp(max=cap) * Reinforce()(view)


def soft_gate(case: Case) -> PolicyLoss:
    """Return SAPO, of tokens or of rows."""
    names = {"tau_positive": ("tau_pos", "sapo_temperature_pos"), "tau_negative": ("tau_neg", "sapo_temperature_neg")}
    given = {ours: first_of(case.params, theirs) for ours, theirs in names.items()}
    loss = SAPO(**{ours: value for ours, value in given.items() if value is not None})
    return OneRatioPerRow(function=loss) if by_sequence(case) else loss


def m2_threshold(case: Case) -> float:
    """Return M2PO's bound on the second moment."""
    return max(case.params["m2_threshold"], SMALLEST)


def trust_region(case: Case) -> PolicyLoss:
    """Return DPPO: verl has the score-function form with a cap."""
    names = {
        "low": ("delta_low", "clip_ratio_low", "clip_ratio"),
        "high": ("delta_high", "clip_ratio_high", "clip_ratio"),
    }
    bounds = {ours: first_of(case.params, theirs, 0.2) for ours, theirs in names.items()}
    cap = first_of(case.params, ("ratio_cap", "clip_ratio_c")) if case.peer == "verl" else None
    kinds: dict[str, Literal["tv", "kl"]] = {"binary_tv": "tv", "binary_kl": "kl"}
    kind = "binary_kl" if case.calls("compute_policy_loss_dppo_kl") else "binary_tv"
    divergence = choose(case, "dppo_type", kinds, default=kind)
    return DPPO(divergence=divergence, cap=cap, **bounds)


def drawn(case: Case) -> PolicyLoss:
    """Return Clip-Cov, where it takes every candidate: peers draw some of them at random, ours by a hash."""
    fraction = "clip_cov_ratio" if case.peer == "verl" else "clip_ratio"
    without_effect(case, "clip_ratio_c")
    only(case, **{fraction: (1.0,)})
    names = {"fraction": fraction, "cov_low": "clip_cov_lb", "cov_high": "clip_cov_ub"}
    given = {ours: case.params.get(theirs) for ours, theirs in names.items()}
    return ClipCov(**clip_of(case), **{ours: value for ours, value in given.items() if value is not None})


def penalised(case: Case) -> PolicyLoss:
    """Return KL-Cov."""
    names = {"fraction": ("kl_cov_ratio", "kl_cov_frac"), "coef": ("ppo_kl_coef",)}
    given = {ours: first_of(case.params, theirs) for ours, theirs in names.items()}
    return KLCov(**{ours: value for ours, value in given.items() if value is not None})


def smooth(case: Case) -> VESPO:
    """Return VESPO with the shape of a case, on the engine's policy where a case weighs old against rollout."""
    names = {
        "k_pos": "k_positive",
        "lambda_pos": "lambda_positive",
        "k_neg": "k_negative",
        "lambda_neg": "lambda_negative",
    }
    shape = {ours: case.params[theirs] for theirs, ours in names.items() if theirs in case.params}
    return VESPO(**shape, anchor="rollout" if "importance_sampling_ratio" in case else "old")


def unclipped(case: Case) -> PolicyLoss:
    """Return the policy gradient; NeMo-RL reads neither bound of the ratio."""
    without_effect(case, "ratio_clip_min", "ratio_clip_max", "sequence_level_importance_ratios")
    return Reinforce()


def product(case: Case) -> PolicyLoss:
    """Return PPO's surrogate on the product of a row's ratios."""
    return OneRatioPerRow(function=with_bound(ClippedSurrogate(**clip_of(case)), math.inf), geometric=False)


LOSSES: Mapping[str, Callable[[Case], PolicyLoss]] = {
    "ppo": surrogate,
    "gspo": per_sequence,
    "cispo": clipped_weight_loss,
    "sapo": soft_gate,
    "dppo": trust_region,
    "clip_cov": drawn,
    "kl_cov": penalised,
    "gmpo": lambda case: GMPO(**clip_of(case)),
    "vespo": smooth,
    "dro": lambda case: DRO(beta=case.params["dro_beta"], anchor="old"),
    "product": product,
    "reinforce": unclipped,
    "cross_entropy": unclipped,
    "rollout_is": unclipped,
    "unclipped": lambda _case: ClippedSurrogate(clip_low=1.0, clip_high=math.inf),
}
"""By our name of a loss."""


BOUNDS = {
    "SkyRL": ("eps_clip_low", "eps_clip_high", "clip_ratio_c"),
    "verl": ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
}
IDLE: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("trl", "cispo"): ("delta",),
    ("trl", "gmpo"): ("delta", "importance_sampling_level"),
    ("trl", "sapo"): ("delta", "epsilon_low", "epsilon_high"),
    ("trl", "vespo"): ("delta", "epsilon_low", "epsilon_high", "importance_sampling_level"),
    ("SkyRL", "cispo"): BOUNDS["SkyRL"],
    ("SkyRL", "dppo"): BOUNDS["SkyRL"],
    ("verl", "cispo"): ("clip_ratio_c",),
    ("verl", "gmpo"): ("clip_ratio_c",),
    **{(peer, kind): names for peer, names in BOUNDS.items() for kind in ("kl_cov", "reinforce", "sapo")},
    **{("SkyRL", kind): BOUNDS["SkyRL"] for kind in ("cross_entropy", "unclipped")},
    ("verl", "dro"): BOUNDS["verl"],
}
"""Parameters that a peer's losses share and this one ignores."""


def loss_of(case: Case) -> PolicyLoss:
    """Return the loss object for a case."""
    kind = kind_of(case)
    without_effect(case, *IDLE.get((case.peer, kind), ()))
    return LOSSES[kind](case)


def bounded(case: Case, loss: PolicyLoss) -> PolicyLoss:
    """Return the same loss with the bound that the peer puts on the log-ratio before exp, where that is not ours."""
    peer = peer_of(case)
    if isinstance(loss, GSPO):
        return FunctionLoss(lambda view: _gspo(averaged(case, view), loss, peer.sequence_log_ratio))
    if peer.log_ratio != LOG_RATIO_BOUND and isinstance(loss, DPPO | ClippedSurrogate) and not loss.prepares:
        return with_bound(loss, peer.log_ratio)
    return loss


def averaged(case: Case, view: LossView) -> LossView:
    """Return the tokens that a mean over a row is of: AReaL leaves those out that its corrections mask."""
    if not peer_of(case).mean_advantage or not by_sequence(case):
        return view
    return view.replace(valid_tokens=view.valid_tokens & Contribution(view, corrections_of(case)).kept)


def _gspo(view: LossView, loss: GSPO, bound: float) -> Tensor:
    """The peers' bound is on one side only, so that it is ours where no row goes beyond."""
    anchor = view.require(f"{loss.anchor}_logprobs")
    beyond = sequence_log_ratio(view.logprobs.detach(), anchor, view.valid_tokens, geometric=True).max() > bound
    return with_bound(loss, bound if beyond or bound == math.inf else LOG_RATIO_BOUND)(view)
