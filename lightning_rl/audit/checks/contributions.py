"""Checks of what is plugged in: it returns what its place asks for, twice the same, and edits nothing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_rl.audit.checks.registry import check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.finding import Finding
from lightning_rl.corrections import Corrections, LossTerm, LossView, Stat
from lightning_rl.rollout import Rollout

EARLY = ("reward_mask", "reward_bonus", "keep_groups", "exclude", "token_reward", "rollout_metrics")
LATE = ("sequence_mask", "token_mask", "token_weight", "loss_term", "metrics")


@check("contributions_fit")
def contributions_fit(evidence: Evidence) -> list[Finding]:
    """Every contribution has the shape and type that its place asks for, logs under its own name, and is the same when
    it is asked twice.
    """
    found, contributions = [], evidence.subject.contributions
    early, late = evidence.groups.sanitize(), evidence.view().sanitize()
    for combined in _combined(contributions):
        combined(late if combined.__name__ in ("policy_factor", "loss_terms", "metrics") else early)
    for callback, method in evidence.subject.contributors(*EARLY, *LATE):
        seen = early if method in EARLY else late
        one, other = (_tensors(getattr(callback, method)(seen)) for _ in range(2))
        if len(one) != len(other) or not all(_same(a, b) for a, b in zip(one, other, strict=True)):
            found.append((f"callback {callback.name}.{method}", seen))
    return [
        Finding(
            check="contributions_fit", culprit=culprit, expected="the same contribution to the same rows",
            observed="another one when asked again", samples=seen.sample_ids[:2].tolist(),
            cure="draw no random numbers, and let nothing but the argument and load_state_dict decide",
        )
        for culprit, seen in found
    ]  # fmt: skip


def _combined(contributions: Corrections) -> list[Callable[[Any], object]]:
    """What the core makes of contributions, which refuses what does not fit."""
    early = [contributions.reward_mask, contributions.reward_bonus, contributions.keep_groups, contributions.exclude]
    late = [contributions.policy_factor, contributions.loss_terms, contributions.metrics]
    return [*early, contributions.token_reward, contributions.rollout_metrics, *late]


def _tensors(given: object) -> list[Tensor]:
    if isinstance(given, LossTerm):
        return [given.per_token.detach() * given.coef]
    if isinstance(given, dict):
        return [stat.moments for stat in given.values() if isinstance(stat, Stat)]
    return [given] if isinstance(given, Tensor) else []


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.double().nan_to_num(), other.double().nan_to_num())


@check("loss_fits")
def loss_fits(evidence: Evidence) -> list[Finding]:
    """The policy loss is one number for each token, and the loss edits nothing that it is shown."""
    view = evidence.prepared(evidence.view().sanitize())
    before = _values(view)
    per_token = evidence.subject.loss(view)
    edited = [name for name, tensor in _values(view).items() if not _same(tensor, before[name])]
    problems = []
    if not isinstance(per_token, Tensor) or per_token.shape != view.valid_tokens.shape:
        got = list(per_token.shape) if isinstance(per_token, Tensor) else type(per_token).__name__
        problems.append((f"a value per token {list(view.valid_tokens.shape)}", f"{got}"))
    if edited:
        problems.append(("a view that is as it was", f"edits of {', '.join(edited)}"))
    return [
        Finding(
            check="loss_fits", culprit=f"loss {evidence.subject.loss_name}", expected=expected, observed=observed,
            samples=view.sample_ids[:2].tolist(), cure="return a new tensor [b, T]; masks and means are the core's",
        )
        for expected, observed in problems
    ]  # fmt: skip


def _values(view: LossView | Rollout) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in view.tensors()}
