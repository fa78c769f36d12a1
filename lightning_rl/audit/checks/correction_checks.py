"""Checks of the library's corrections against the formulas of their docstrings."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_rl.audit.evidence import Evidence
from lightning_rl.callbacks import (
    OPSM,
    AdaptiveKL,
    DynamicSampling,
    IcePop,
    NoEOSMask,
    OffPolicyIS,
    OutlierMask,
    OverlongPenalty,
    ReferenceKL,
    RolloutKL,
    SequenceRatioMask,
    TruncatedIS,
)
from lightning_rl.rollout import FinishReason, Rollout
from lightning_rl.signal.kl import KL_ESTIMATORS
from lightning_rl.testing.properties.case import SHOWN_A_ROLLOUT
from lightning_rl.testing.properties.check import check
from lightning_rl.testing.properties.comparisons import NO_ROWS, Skip
from lightning_rl.testing.properties.formula_checks import uniform_view
from lightning_rl.testing.properties.loss_term_checks import KL
from lightning_rl.utils.finding import Finding

Formula = Callable[[Any, Any], Tensor | None]
CLOSE = 1e-4  # relative to the largest value
SPREADS = (1.0, 2.0)  # nats between two policies


def _mean(values: Tensor, rows: Rollout) -> Tensor:
    """Return the mean of each row over its valid tokens, [B]."""
    valid = rows.valid_tokens
    return torch.where(valid, values, 0.0).sum(-1) / valid.sum(-1).clamp(min=1)


def _gap(rows: Rollout) -> Tensor:
    """Return the log-ratio of the trainer's policy before the update to the engine's, 0 at invalid tokens, [B, T]."""
    gap = rows.require("old_logprobs").detach().double() - rows.require("rollout_logprobs").detach().double()
    return torch.where(rows.valid_tokens, gap, 0.0)


def _bounded_ratio(one: Any, rows: Rollout) -> Tensor:
    gap = _gap(rows)
    total = gap.sum(-1, keepdim=True)
    geometric = total / rows.valid_tokens.sum(-1, keepdim=True).clamp(min=1)
    levels = {"token": gap, "sequence": total.expand_as(gap), "geometric": geometric.expand_as(gap)}
    return levels[one.level].exp().clamp(one.floor, one.cap)


def _mean_inverse(one: Any, rows: Rollout) -> Tensor:
    """Return the inverse of the mean of the bounded weights, over tokens or over rows with one, [B]."""
    weights, valid = _bounded_ratio(one, rows), rows.valid_tokens
    counted = weights[valid] if one.level == "token" else weights[valid.any(-1), 0]
    return (1 / counted.mean()).expand(len(rows)) if len(counted) else torch.ones(len(rows), dtype=torch.float64)


def _weight(one: Any, rows: Rollout) -> Tensor:
    return _bounded_ratio(one, rows) * (rows.extras["truncated_is_scale"].double()[:, None] if one.normalized else 1.0)


def _ratio_band(one: Any, rows: Rollout) -> Tensor:
    gap, valid = _gap(rows), rows.valid_tokens
    largest = torch.where(valid.any(-1), torch.where(valid, gap, -math.inf).amax(-1), 0.0)
    ratio = {"geometric": _mean(gap, rows), "product": gap.sum(-1), "max": largest}[one.statistic].exp()
    return (ratio >= one.low) & (ratio <= one.high)


def _opsm(one: Any, rows: Any) -> Tensor:
    drift = rows.require(f"{one.against}_logprobs") - rows.logprobs.detach()
    return (_mean(rows.require("advantages"), rows) >= 0) | (_mean(drift, rows) <= one.delta)


def _kl(one: Any, now: Tensor, other: Tensor) -> Tensor | None:
    """Return the KL per token by the estimator of a correction; None if it is not named."""
    names = [name for name, known in KL_ESTIMATORS.items() if known is one.estimator]
    return KL[names[0]](now.detach().double(), other.detach().double()) if names else None


def _reference_term(one: Any, rows: Any) -> Tensor | None:
    per_token = _kl(one, rows.logprobs, rows.require("ref_logprobs"))
    if per_token is None or not one.unbiased:
        return per_token if per_token is None else one.beta * per_token
    return one.beta * per_token * (rows.logprobs.detach() - rows.require("old_logprobs")).exp()


def _reference_reward(one: Any, rows: Rollout) -> Tensor | None:
    per_token = _kl(one, rows.require("old_logprobs"), rows.require("ref_logprobs"))
    return None if per_token is None else -one.beta * per_token


def _rollout_term(one: Any, rows: Any) -> Tensor | None:
    per_token = _kl(one, rows.logprobs, rows.require("rollout_logprobs"))
    return None if per_token is None else one.coef * per_token


def _overlong(one: Any, rows: Rollout) -> Tensor:
    excess = rows.action_mask.sum(-1).double() - (one.max_length - one.cache)
    return -one.coef * (excess / one.cache).clamp(0, 1)


def _not_at_limit(_one: Any, rows: Rollout) -> Tensor:
    return (rows.finish != FinishReason.LENGTH) & (rows.finish != FinishReason.TURNS)


def _row_varies(one: Any, rows: Rollout) -> Tensor:
    """Return True for rows of groups whose scores by the function that decides vary, [B] bool."""
    by_name = rows.rewards_by_function
    scores = by_name[one.correct_by] if one.correct_by else rows.rewards.double()
    for values in reversed(() if one.correct_by else tuple(by_name.values())):
        scores = torch.where(values.isnan(), scores, values.double())
    varied = torch.zeros(len(rows), dtype=torch.bool)
    for group in rows.groups.unique():
        members = rows.groups == group
        known = scores[members & rows.rewarded & ~scores.isnan()]
        varied[members] = len(known) > 1 and float(known.double().std()) > one.tolerance
    return varied


FORMULAS: Mapping[tuple[type, str], Formula] = {
    (TruncatedIS, "token_weight"): _weight,
    (TruncatedIS, "provide"): _mean_inverse,
    (OffPolicyIS, "token_weight"): lambda one, rows: (
        (rows.logprobs.detach() - rows.require("rollout_logprobs")).exp().clamp(one.min_ratio, one.max_ratio)
    ),
    (IcePop, "token_mask"): lambda one, rows: (_gap(rows).exp() >= one.low) & (_gap(rows).exp() <= one.high),
    (OutlierMask, "sequence_mask"): lambda one, rows: (
        ((_gap(rows).exp() >= one.low) & (_gap(rows).exp() <= one.high)) | ~rows.valid_tokens
    ).all(-1),
    (SequenceRatioMask, "sequence_mask"): _ratio_band,
    (OPSM, "sequence_mask"): _opsm,
    (ReferenceKL, "loss_term"): _reference_term,
    (ReferenceKL, "token_reward"): _reference_reward,
    (AdaptiveKL, "loss_term"): _reference_term,
    (AdaptiveKL, "token_reward"): _reference_reward,
    (RolloutKL, "loss_term"): _rollout_term,
    (OverlongPenalty, "reward_bonus"): _overlong,
    (NoEOSMask, "reward_mask"): _not_at_limit,
    (DynamicSampling, "keep_groups"): _row_varies,
}
"""Contributions of corrections of the library. Source: the docstrings of :mod:`lightning_rl.callbacks`."""


@check(
    expected="the contribution by the formula of its class",
    cure="compute it as the docstring of its module says, with the options of the callback",
)
def correction_formula(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Weights, masks, rewards and terms of the library's corrections are those of their formulas."""
    if not evidence.rows.valid_tokens.any():
        yield Skip(NO_ROWS)
        return
    far = [uniform_view(evidence, advantage=sign, spread=spread) for spread in SPREADS for sign in (1.0, -1.0)]
    for one in evidence.contributions(*{method for _, method in FORMULAS}):
        formula = FORMULAS.get((type(one.callback), one.method))
        if formula is None:
            continue
        shown: Sequence[Rollout] = far
        if one.method in SHOWN_A_ROLLOUT:
            rollout = evidence.rollout if one.method in ("reward_bonus", "reward_mask") else evidence.groups
            shown = evidence.rounds if one.method == "keep_groups" else [rollout.sanitize()]
        for rows in shown:
            theirs, ours = formula(one.callback, rows), next(iter(one.tensors(rows).values()))
            wrong = torch.zeros(len(rows), dtype=torch.bool) if theirs is None else _differs(ours, theirs, rows)
            if wrong.any():
                yield Finding(culprit=str(one), samples=rows.sample_ids.cpu()[wrong][:4].tolist())
                break


def _differs(ours: Tensor, theirs: Tensor, rows: Rollout) -> Tensor:
    """Return the rows in which two contributions differ at a valid token, [B] bool."""
    ours, theirs = ours.detach().double().cpu(), theirs.detach().double().cpu()
    real = rows.real.cpu()
    valid = rows.valid_tokens.cpu() if ours.dim() > 1 else real
    wrong = valid & ((ours - theirs).abs() > CLOSE * torch.where(valid, theirs.abs(), 0.0).max().clamp(min=1e-6))
    return (wrong.any(-1) if ours.dim() > 1 else wrong) & real
