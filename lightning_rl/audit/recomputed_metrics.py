"""Metrics of a run, recomputed from its rollout and from the outputs of its models in a step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from lightning_rl.algorithm import Algorithm
from lightning_rl.audit.audit_error import rounding
from lightning_rl.audit.copies import CopyError, copy_state
from lightning_rl.audit.facts import RunFacts
from lightning_rl.corrections import REWARDS, Corrections, LossView, RLCallback, Stat
from lightning_rl.corrections.stat import StatReduction
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
"""Reduction of each metric of the core; by default the mean."""


LIMITS = (FinishReason.LENGTH, FinishReason.TURNS)


def population(values: Tensor, reduction: StatReduction = "mean") -> Stat:
    """Return the statistic of numbers by its definition, in float64."""
    exact = values.detach().double().flatten().cpu()
    count, mean = float(len(exact)), float(exact.mean()) if len(exact) else 0.0
    squares = float((exact - mean).square().sum())
    maximum = float(exact.max()) if len(exact) else -math.inf
    return Stat(torch.tensor([count, mean, squares, maximum], dtype=torch.float64), reduction)


def merge(parts: Iterable[Mapping[str, Stat]]) -> dict[str, Stat]:
    """Merge statistics of disjoint populations; a name may be missing in some.

    Source: the definitions of count, mean and sum of squares: the squares of both parts around zero add up.
    """
    merged: dict[str, Stat] = {}
    for name, stat in (item for part in parts for item in part.items()):
        merged[name] = _join(merged[name], stat) if name in merged else Stat(stat.moments.cpu(), stat.reduction)
    return merged


def value_of(stat: Stat) -> float:
    """Return the number to log by its definition; NaN for an empty population."""
    count, mean, squares, maximum = stat.moments.tolist()
    if not count:
        return math.nan
    weight = squares + count * mean**2  # sum of all squares
    return {
        "mean": mean,
        "sum": count * mean,
        "max": maximum,
        "std": math.sqrt(squares / max(count - 1, 1)),
        "ess": count * mean**2 / weight if mean else math.nan,
    }[stat.reduction]


def _join(one: Stat, other: Stat) -> Stat:
    (n, mean, squares, high), (m, further, others, higher) = one.moments.tolist(), other.moments.tolist()
    total = n + m
    if not total:
        return one
    joint = (n * mean + m * further) / total
    spread = squares + others + n * (mean - joint) ** 2 + m * (further - joint) ** 2
    return Stat(torch.tensor([total, joint, spread, max(high, higher)], dtype=torch.float64), one.reduction)


def kl_values(rows: Rollout, logprobs: Tensor) -> dict[str, Tensor]:
    """Return the per-token values of each KL metric from unmodified log-probabilities, float64."""
    logprobs, values = logprobs.detach().double(), dict[str, Tensor]()
    if rows.ref_logprobs is not None:
        values["kl/ref"] = logprobs - rows.ref_logprobs.double()
    for name, other in (("kl/rollout", rows.rollout_logprobs), ("kl/old", rows.old_logprobs)):
        if other is not None:
            gap = logprobs - other.double()
            values[name] = gap.exp() - 1 - gap
    return values


def rollout_figures(rollout: Rollout, number: int, algorithm: Algorithm) -> dict[str, Stat]:
    """Return the core's metrics of a finished rollout."""
    real, rewarded, valid = rollout.real, rollout.rewarded, rollout.valid_tokens
    lengths, advantages = rollout.action_mask.sum(-1)[real], rollout.require("advantages")[valid]
    age = (number - rollout.policy_version)[valid]
    values = {
        "reward/task": rollout.rewards[rewarded],
        "reward/missing": ~rewarded[rollout.trained],
        "length/mean": lengths,
        "length/max": lengths,
        "length/truncated": torch.isin(rollout.finish, rollout.finish.new_tensor(LIMITS))[real],
        "advantage/mean": advantages,
        "advantage/max": advantages,
        "advantage/std": advantages,
        "staleness/mean": age,
        "staleness/max": age,
        **{f"reward/{name}": one[rewarded & ~one.isnan()] for name, one in rollout.rewards_by_function.items()},
    }
    if GREEDY_SCORE in rollout.extras:
        values["reward/greedy"] = rollout.extras[GREEDY_SCORE][rewarded]
    return {name: population(one, REDUCTIONS.get(name, "mean")) for name, one in values.items()} | _reward_figures(
        rollout, algorithm
    )


def sampling_figures(
    rounds: Sequence[tuple[Rollout, Sequence[RewardCall]]], rollout: Rollout, facts: RunFacts
) -> dict[str, Stat]:
    """Return the core's counts before a rollout is finished, from the samples and reward calls of each round.

    A row counts as failed if a function with a weight returned a value that is neither finite nor None.
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
            if len(call.values) == len(part) and facts.reward_weights.get(call.name):  # greedy answers are not rows
                wrong |= rows
        failed += len(wrong)
    scores = [group for part, _ in rounds for group in _scores_of_groups(part)]
    counts = {
        "groups/sampled": sum(sampled) // facts.group_size,
        "groups/filtered": (sum(sampled) - len(rollout)) // facts.group_size,
        "groups/solved": sum(min(group) >= 1 for group in scores),
        "groups/unsolved": sum(max(group) <= 0 for group in scores),
        "engine/aborted": sum(int((part.finish == FinishReason.ABORT).sum()) for part, _ in rounds),
        "reward/failed": failed,
        **by_function,
    }
    return {name: replace(population(torch.tensor([float(n)])), reduction="sum") for name, n in counts.items()}


def _scores_of_groups(rollout: Rollout) -> Iterable[list[float]]:
    """Return the scores of each group by the first function that applies to a row, without groups that have none."""
    found: dict[int, list[float]] = {}
    functions = [one.tolist() for one in rollout.rewards_by_function.values()] or [rollout.rewards.tolist()]
    for group, *scores in zip(rollout.groups.tolist(), *functions, strict=True):
        found.setdefault(group, []).extend([score for score in scores if not math.isnan(score)][:1])
    return filter(None, found.values())


def shaped_parts(rollout: Rollout, corrections: Corrections) -> tuple[Tensor, Tensor]:
    """Return the score of each row, [B], and the token rewards, [B, T], in float64."""
    rewards = rollout.rewards
    for callback in corrections.contributors("replace_reward"):
        rewards = callback.replace_reward(rollout)
    scores = torch.where(rollout.rewarded, rewards.double(), 0.0)
    for callback in corrections.contributors("reward_bonus"):
        scores = scores + callback.reward_bonus(rollout).double()
    nothing = torch.zeros(rollout.valid_tokens.shape, dtype=torch.float64, device=scores.device)
    return scores, sum(token_parts(rollout, corrections).values(), nothing)


def token_parts(rollout: Rollout, corrections: Corrections) -> dict[RLCallback, Tensor]:
    """Return the token rewards of each callback, [B, T], in float64 and 0 at other than valid tokens."""
    giving = corrections.contributors("token_reward")
    return {one: torch.where(rollout.valid_tokens, one.token_reward(rollout).double(), 0.0) for one in giving}


def _reward_figures(rollout: Rollout, algorithm: Algorithm) -> dict[str, Stat]:
    """Return metrics of bonuses and token rewards; empty if one of them comes from an adaptive callback."""
    corrections, rollout = algorithm.corrections, rollout.sanitize()
    giving = corrections.contributors(*REWARDS)
    if any(callback.state_dict() for callback in giving):
        return {}
    scores, tokens = shaped_parts(rollout, corrections)
    totals = torch.where(rollout.valid_tokens.any(-1), scores, 0.0) + tokens.sum(-1)
    values = {"reward/shaped": totals[rollout.trained], "groups/zero_variance": _idle_groups(rollout, scores)}
    parts = {one: part[rollout.valid_tokens] for one, part in token_parts(rollout, corrections).items()}
    values |= {f"{one.name}/token_reward": part for one, part in parts.items() if not one.penalizes_kl}
    if penalties := [part for one, part in parts.items() if one.penalizes_kl]:
        values["kl/penalty"] = -sum(penalties, torch.zeros_like(penalties[0]))
    return {name: population(one) for name, one in values.items()}


def _idle_groups(rollout: Rollout, scores: Tensor) -> Tensor:
    """Return for each group with a rewarded row True if all its scores are equal up to rounding of their parts, [G]."""
    members = [rollout.rewarded & (rollout.groups == group) for group in rollout.groups[rollout.rewarded].unique()]
    parts = 2 * rollout.rewards.double().abs() + scores.abs()  # at least the reward and its bonuses
    ranges = [float(scores[rows].max() - scores[rows].min()) for rows in members]
    return torch.tensor([span <= 4e-12 * float(parts[rows].max()) for span, rows in zip(ranges, members, strict=True)])


def step_figures(
    rows: Rollout, logprobs: Tensor, entropy: Tensor, values: Tensor | None, parts: Mapping[str, Tensor]
) -> dict[str, Stat]:
    """Return the core's metrics of an optimizer step from the policy's outputs on its rows."""
    valid, exact = rows.valid_tokens, logprobs.double()
    if rows.old_logprobs is None:  # without an old pass the old policy is the current one
        rows = rows.replace(old_logprobs=logprobs.detach())
    named = {"policy/entropy": entropy[valid]} | {name: one[valid] for name, one in kl_values(rows, exact).items()}
    ratio = (exact - rows.require("old_logprobs").double()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)[valid].exp()
    named |= {"policy/ratio_max": ratio, "policy/ess": ratio}
    if values is not None and rows.returns is not None:
        named["value/error"] = (values - rows.returns).double().abs()[valid]
    named |= {name: part.double().reshape(1) for name, part in parts.items()}
    return {name: population(one, REDUCTIONS.get(name, "mean")) for name, one in named.items()}


def microbatch_figures(algorithm: Algorithm, views: Sequence[LossView]) -> dict[str, Stat]:
    """Return the metrics of corrections and loss on each microbatch, merged."""
    parts = list[dict[str, Stat]]()
    for view in (view.sanitize() for view in views):
        with torch.no_grad():
            factor = algorithm.corrections.policy_factor(view)
            parts.append({**factor.stats, **algorithm.loss.metrics(view), **algorithm.corrections.metrics(view)})
    return merge(parts)


def callback_figures(callbacks: Iterable[RLCallback], rollout: Rollout) -> dict[str, Stat]:
    """Return the metrics of callbacks that can be copied on a finished rollout. A collective."""
    twins = list[RLCallback]()
    for callback in callbacks:
        if not callback.contributes & {"exclude", "rollout_metrics"}:
            continue
        with suppress(CopyError):
            twins.append(copy_state(callback))
    corrections = Corrections(twins)
    excluded = {
        f"{callback.name}/excluded": population(callback.exclude(rollout)[rollout.real])
        for callback in corrections.contributors("exclude")
    }
    return excluded | corrections.rollout_metrics(rollout)


def is_figure(figure: float, stat: Stat, scale: float = 0.0) -> bool:
    """Return True if a number is the value of a statistic up to rounding of its largest number or ``scale``."""
    count, mean, squares, maximum = stat.moments.tolist()
    truth = value_of(stat)
    if math.isnan(truth):
        return True
    spread = math.sqrt(squares / count) if count else 0.0
    size = max(abs(mean) + spread, abs(maximum) if math.isfinite(maximum) else 0.0, abs(truth), scale)
    return abs(figure - truth) <= rounding(torch.float32, size, 256)


def figure_of(moments: Sequence[Tensor], reduction: StatReduction) -> tuple[float, float]:
    """Return population and value of a metric that was logged in several parts."""
    joint = merge({"": Stat(part.cpu(), reduction)} for part in moments)[""]
    return float(joint.moments[0]), value_of(joint)
