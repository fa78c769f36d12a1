"""Outputs that other systems record beside a policy loss: clip masks, clip fractions, KL to the old policy."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from goldens.cases import Case, Outputs
from goldens.corrections import Contribution, corrections_of, geometric_weight, untruncated
from goldens.policy_options import OneRatioPerRow, averaged, dual_clip_of
from goldens.reduction_options import average_of
from goldens.views import reduced
from lightning_rl import LossView, PolicyLoss
from lightning_rl.losses import CISPO, DPPO, GSPO, SAPO, ClippedSurrogate
from lightning_rl.signal.importance_ratios import policy_ratio
from lightning_rl.signal.kl import Clamped, k1
from lightning_rl.signal.reductions import token_mean

CLIPPED = ("clipfrac", "pg_clipfrac", "clip_ratio")


def logged(case: Case, view: LossView, loss: PolicyLoss, done: Contribution) -> Outputs:
    """Masks and shares of clipped tokens for the losses that clip, the drifts of the policy, and what was rejected."""
    old, rollout = view.require("old_logprobs"), view.require("rollout_logprobs")
    drift = Clamped(k1, value=math.inf, log_ratio=_bound(case))(old, view.logprobs.detach())
    changed = ~done.kept | (done.weight != _unbounded(case, view))
    found = {
        "ppo_kl": _mean(case, view, drift),
        "rollout_kl": _mean(case, view, k1(rollout, old)),
        "filtered_fraction": reduced(view, changed.to(drift.dtype), token_mean),
    }
    if isinstance(loss, DPPO):
        return {**found, "pg_clipfrac": _mean(case, view, loss.outside(view).to(drift.dtype))}
    if type(loss) not in (ClippedSurrogate, GSPO, CISPO, SAPO, OneRatioPerRow):
        return found
    seen = averaged(case, view)
    clipped, dual = _clip_masks(case, seen, loss)
    share, dual_share = (_mean(case, view, mask.to(drift.dtype)) for mask in (clipped, dual))
    found |= {"clip_mask": clipped & seen.valid_tokens, "dual_clip_mask": dual & seen.valid_tokens}
    return {**found, **dict.fromkeys(CLIPPED, share), "pg_clipfrac_lower": dual_share}


def _unbounded(case: Case, view: LossView) -> Tensor:
    """The weights before a bound, where corrections bound them."""
    chosen = case.params.get("rejection_sampling")
    if not chosen:
        return torch.ones_like(view.logprobs)
    geometric = chosen.get("level") == "sequence" and chosen.get("metric", "ratio") == "ratio"
    return (geometric_weight() if geometric else untruncated()).token_weight(view)


def _bound(case: Case) -> float:
    return case.implicit.get("log_ratio_clamp", math.inf) if case.peer == "verl" else math.inf


def _mean(case: Case, view: LossView, values: Tensor) -> Tensor:
    if case.peer == "slime":
        average = average_of(case)
        return reduced(view, values, average.reduction) * average.scale(view.valid_tokens, view.trained)
    return reduced(view, values, token_mean)


def _clip_masks(case: Case, view: LossView, loss: PolicyLoss) -> tuple[Tensor, Tensor]:
    none = torch.zeros_like(view.valid_tokens)
    if isinstance(loss, CISPO):
        weight = policy_ratio(view.logprobs, view.require(f"{loss.anchor}_logprobs"))
        changed = weight != weight.clamp(1 - loss.clip_low, 1 + loss.clip_high)
        return changed & Contribution(view, corrections_of(case)).kept, none
    if not isinstance(loss, ClippedSurrogate):
        return none, none
    single = replace(loss, dual_clip=None)
    loose, advantages = replace(single, clip_low=1.0, clip_high=math.inf), view.require("advantages")
    cap = dual_clip_of(case)["dual_clip"]
    dual = none if cap is None else (advantages < 0) & (single(view) > -cap * advantages)
    return loose(view) < single(view), dual
