"""Metrics of a run, recomputed from its rollout and from the outputs of its models in a step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from lightning_rl.algorithm import Algorithm
from lightning_rl.audit.facts import RunFacts
from lightning_rl.corrections import REWARDS, Corrections, LossView, RLCallback, Stat
from lightning_rl.corrections.stat import StatReduction
from lightning_rl.rewards import RewardCall
from lightning_rl.rollout import GREEDY_SCORE, FinishReason, Rollout
from lightning_rl.signal.importance_ratios import LOG_RATIO_BOUND
from lightning_rl.testing.properties.copies import CopyError, copy_state
from lightning_rl.testing.properties.definitions import merge, population, shaped_parts, token_parts

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
