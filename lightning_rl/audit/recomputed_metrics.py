"""Figures: what the metrics of a run should be, recomputed from its rollout and from what its models said in a step."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_rl.algorithm import Algorithm
from lightning_rl.audit.audit_error import rounding
from lightning_rl.audit.facts import RunFacts
from lightning_rl.corrections import TOKEN_REWARDS, Corrections, LossView, RLCallback, Stat
from lightning_rl.corrections.stat import StatReduction, reduce_moments
from lightning_rl.rewards import RewardCall
from lightning_rl.rollout import GREEDY_SCORE, FinishReason, Rollout
from lightning_rl.signal.importance_ratios import LOG_RATIO_BOUND

REDUCTIONS: Mapping[str, StatReduction] = {
    "length/max": "max",
    "advantage/max": "max",
    "advantage/std": "std",
    "policy/ratio_max": "max",
    "policy/ess": "ess",
    "staleness/max": "max",
    "rollout": "max",
}
"""Which figure of its population a metric of the core is; the mean where nothing else is said."""


def population(values: Tensor, reduction: StatReduction = "mean") -> Stat:
    """The statistic of some numbers by its definition, in float64."""
    exact = values.detach().double().flatten().cpu()
    count, mean = float(len(exact)), float(exact.mean()) if len(exact) else 0.0
    squares = float((exact - mean).square().sum())
    maximum = float(exact.max()) if len(exact) else -math.inf
    return Stat(torch.tensor([count, mean, squares, maximum], dtype=torch.float64), reduction)


def merge(parts: Iterable[Mapping[str, Stat]]) -> dict[str, Stat]:
    """Joins statistics of disjoint populations; a name may be missing in some.

    Source: the definitions of count, mean and sum of squares: the squares of both parts around zero add up.
    """
    merged: dict[str, Stat] = {}
    for name, stat in (item for part in parts for item in part.items()):
        merged[name] = _join(merged[name], stat) if name in merged else Stat(stat.moments.cpu(), stat.reduction)
    return merged


def _join(one: Stat, other: Stat) -> Stat:
    (n, mean, squares, high), (m, further, others, higher) = one.moments.tolist(), other.moments.tolist()
    total = n + m
    if not total:
        return one
    joint = (n * mean + m * further) / total
    spread = squares + others + n * (mean - joint) ** 2 + m * (further - joint) ** 2
    return Stat(torch.tensor([total, joint, spread, max(high, higher)], dtype=torch.float64), one.reduction)


def kl_values(rows: Rollout, logprobs: Tensor) -> dict[str, Tensor]:
    """What each KL metric is the mean of, from untouched log-probabilities, at every token, float64."""
    logprobs, values = logprobs.detach().double(), dict[str, Tensor]()
    if rows.ref_logprobs is not None:
        values["kl/ref"] = logprobs - rows.ref_logprobs.double()
    for name, other in (("kl/rollout", rows.rollout_logprobs), ("kl/old", rows.old_logprobs)):
        if other is not None:
            gap = logprobs - other.double()
            values[name] = gap.exp() - 1 - gap
    return values


def rollout_figures(rollout: Rollout, number: int, algorithm: Algorithm) -> dict[str, Stat]:
    """The metrics of the core of a finished rollout, each from the population that it is named after."""
    real, rewarded, valid = rollout.real, rollout.rewarded, rollout.valid_tokens
    lengths, advantages = rollout.action_mask.sum(-1)[real], rollout.require("advantages")[valid]
    age = (number - rollout.policy_version)[valid]
    values = {
        "reward/task": rollout.rewards[rewarded],
        "reward/missing": ~rewarded[rollout.trained],
        "length/mean": lengths,
        "length/max": lengths,
        "length/truncated": rollout.cut_off[real],
        "advantage/mean": advantages,
        "advantage/max": advantages,
        "advantage/std": advantages,
        "staleness/mean": age,
        "staleness/max": age,
        **{f"reward/{name}": one[rewarded & ~one.isnan()] for name, one in rollout.task_rewards.items()},
    }
    if GREEDY_SCORE in rollout.extras:
        values["reward/greedy"] = rollout.extras[GREEDY_SCORE][rewarded]
    return {name: population(one, REDUCTIONS.get(name, "mean")) for name, one in values.items()} | _reward_figures(
        rollout, algorithm
    )


def sampling_figures(
    rounds: Sequence[tuple[Rollout, Sequence[RewardCall]]], rollout: Rollout, facts: RunFacts
) -> dict[str, Stat]:
    """What the core counts before a rollout is finished, from the samples of each round and what rewards said of them.

    A row counts as failed if a function that has a weight gave it neither a number nor nothing.
    """
    sampled, failed = [len(part) for part, _ in rounds], 0
    if not facts.group_size or not rounds or any(number % facts.group_size for number in sampled):
        return {}
    by_function: dict[str, int] = {}
    for part, calls in rounds:
        wrong = set[int]()
        for call in calls:
            rows = {row for row, value in enumerate(call.values) if value is not None and not math.isfinite(value)}
            by_function[f"reward_failed/{call.name}"] = by_function.get(f"reward_failed/{call.name}", 0) + len(rows)
            if len(call.values) == len(part) and facts.reward_weights.get(call.name):  # greedy answers are no rows
                wrong |= rows
        failed += len(wrong)
    counts = {
        "groups/sampled": sum(sampled) // facts.group_size,
        "groups/filtered": (sum(sampled) - len(rollout)) // facts.group_size,
        "engine/aborted": sum(int((part.finish == FinishReason.ABORT).sum()) for part, _ in rounds),
        "reward/failed": failed,
        **by_function,
    }
    return {name: replace(population(torch.tensor([float(n)])), reduction="sum") for name, n in counts.items()}


def _reward_figures(rollout: Rollout, algorithm: Algorithm) -> dict[str, Stat]:
    """What needs bonuses and token rewards; nothing if one of them comes from a callback that adapts itself."""
    corrections, rollout = algorithm.corrections, rollout.sanitize()
    giving = corrections.contributors("reward_bonus", *TOKEN_REWARDS)
    if any(callback.state_dict() for callback in giving):
        return {}
    scores = torch.where(rollout.rewarded, rollout.rewards.double(), 0.0)
    tokens = torch.zeros(rollout.valid_tokens.shape, dtype=torch.float64, device=scores.device)
    for callback in corrections.contributors("reward_bonus"):
        scores = scores + callback.reward_bonus(rollout).double()
    for method in TOKEN_REWARDS:
        for callback in corrections.contributors(method):
            tokens = tokens + torch.where(rollout.valid_tokens, getattr(callback, method)(rollout).double(), 0.0)
    totals = torch.where(rollout.valid_tokens.any(-1), scores, 0.0) + tokens.sum(-1)
    values = {"reward/shaped": totals[rollout.trained], "groups/zero_variance": _idle_groups(rollout, scores)}
    if corrections.contributors(*TOKEN_REWARDS):
        values["kl/penalty"] = -tokens[rollout.valid_tokens]
    return {name: population(one) for name, one in values.items()}


def _idle_groups(rollout: Rollout, scores: Tensor) -> Tensor:
    """For each group with a rewarded row whether all of its scores are equal, [G]."""
    groups = rollout.groups[rollout.rewarded].unique()
    exact = scores.to(rollout.rewards.dtype)  # as the estimator sees them
    members = [exact[rollout.rewarded & (rollout.groups == group)] for group in groups]
    return torch.tensor([bool((own == own[0]).all()) for own in members])


def step_figures(
    rows: Rollout, logprobs: Tensor, entropy: Tensor, values: Tensor | None, parts: Mapping[str, Tensor]
) -> dict[str, Stat]:
    """The metrics of the core of an optimizer step, from what the policy said of its rows."""
    valid, exact = rows.valid_tokens, logprobs.double()
    if rows.old_logprobs is None:  # without an old pass the old policy is the step's own
        rows = rows.replace(old_logprobs=logprobs.detach())
    named = {"policy/entropy": entropy[valid]} | {name: one[valid] for name, one in kl_values(rows, exact).items()}
    ratio = (exact - rows.require("old_logprobs").double()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)[valid].exp()
    named |= {"policy/ratio_max": ratio, "policy/ess": ratio}
    if values is not None and rows.returns is not None:
        named["value/error"] = (values - rows.returns).double().abs()[valid]
    named |= {name: part.double().reshape(1) for name, part in parts.items()}
    return {name: population(one, REDUCTIONS.get(name, "mean")) for name, one in named.items()}


def microbatch_figures(algorithm: Algorithm, views: Sequence[LossView]) -> dict[str, Stat]:
    """What corrections and loss measure of each microbatch, asked once more."""
    parts = list[dict[str, Stat]]()
    for view in (view.sanitize() for view in views):
        with torch.no_grad():
            factor = algorithm.corrections.policy_factor(view)
            parts.append({**factor.stats, **algorithm.loss.metrics(view), **algorithm.corrections.metrics(view)})
    return merge(parts)


def callback_figures(callbacks: Iterable[RLCallback], rollout: Rollout) -> dict[str, Stat]:
    """What callbacks measure of a finished rollout, asked once more on copies. A collective."""
    corrections = Corrections([copy.copy(callback) for callback in callbacks])
    excluded = {
        f"{callback.name}/excluded": population(callback.exclude(rollout)[rollout.real])
        for callback in corrections.contributors("exclude")
    }
    return excluded | corrections.rollout_metrics(rollout)


def is_figure(figure: float, stat: Stat, scale: float = 0.0) -> bool:
    """Whether a figure is that of a statistic, up to rounding of the largest number in it, or of ``scale``."""
    count, mean, squares, maximum = stat.moments.tolist()
    truth = stat.value()
    if math.isnan(truth):
        return True
    spread = math.sqrt(squares / count) if count else 0.0
    size = max(abs(mean) + spread, abs(maximum) if math.isfinite(maximum) else 0.0, abs(truth), scale)
    return abs(figure - truth) <= rounding(torch.float32, size, 256)


def figure_of(moments: Sequence[Tensor], reduction: StatReduction) -> tuple[float, float]:
    """Population and figure of what was handed to the log in several parts."""
    joint = merge({"": Stat(part.cpu(), reduction)} for part in moments)[""]
    return float(joint.moments[0]), reduce_moments(joint.moments.tolist(), reduction)
