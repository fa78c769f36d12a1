"""Knob liveness: every number that a loss, an estimator or a correction was given has to change something."""

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_rl.audit.checks.registry import check
from lightning_rl.audit.evidence import Evidence, pattern_of
from lightning_rl.audit.finding import Finding
from lightning_rl.corrections import LossTerm, LossView, RLCallback
from lightning_rl.rollout import TOKEN, Rollout

DRIFTS = (0.5, 3.0, -3.0, -0.5, 0.02)
FEW = 3  # tokens that a row needs for a discount to matter
EARLY = ("reward_mask", "reward_bonus", "keep_groups", "exclude", "token_reward")
LATE = ("sequence_mask", "token_mask", "token_weight", "loss_term")
Measured = list[Tensor]


@check("knob_liveness")
def knob_liveness(evidence: Evidence) -> list[Finding]:
    """Every number that the constructor of the loss, the estimator or a correction was given in the place of a default
    changes what they return for some witness: none is read and then ignored.
    """
    subject, dead = evidence.subject, list[tuple[str, str]]()
    if len(evidence.rows) < FEW or int(evidence.rows.valid_tokens.sum(-1).max()) < FEW:
        return []
    witnesses = list(_views(evidence))
    if not subject.loss.prepares:
        dead += [(f"loss {subject.loss_name}", name) for name in _dead(subject.loss, _losses, witnesses)]
    dead += [(f"estimator {subject.estimator.name}", name) for name in _dead_in_estimator(evidence)]
    groups = _rollouts(evidence)
    for callback in subject.contributions.callbacks:
        if not callback.state_dict():  # what adapts itself may rest for a while
            seen = [*groups, *witnesses]
            dead += [(f"callback {callback.name}", name) for name in _dead(callback, _contributions, seen)]
    return [
        Finding(
            check="knob_liveness", culprit=culprit, expected=f"{name} to change something",
            observed="the same result for every value", cure=f"use self.{name} where the formula has it, or drop it",
            samples=evidence.rows.sample_ids[:2].tolist(),
        )
        for culprit, name in dead
    ]  # fmt: skip


def knobs_of(thing: object) -> list[str]:
    """Names of the numbers that a constructor was given, other than its defaults, and that lie under the same name."""
    known, given = _attributes(thing), inspect.signature(type(thing).__init__).parameters.items()
    chosen = [name for name, parameter in given if name in known and getattr(thing, name) != parameter.default]
    declared = set(dir(RLCallback)) if isinstance(thing, RLCallback) else set[str]()
    return [name for name in chosen if name not in declared and _is_number(getattr(thing, name))]


def _attributes(thing: object) -> set[str]:
    slots = (name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()))
    return {*getattr(thing, "__dict__", {}), *slots}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _turned(thing: Any, name: str) -> Iterator[Any]:
    """Copies with another number under a name, as far as the constructor's checks let them pass."""
    value = getattr(thing, name)
    whole = isinstance(value, int)
    for other in (value * 2 + 1, value / 2, 1.0, 0.05, 0.0, value + 10):
        number = int(other) if whole and math.isfinite(other) else other
        if number == value:
            continue
        turned = copy.copy(thing)
        object.__setattr__(turned, name, number)
        yield turned


def _dead(thing: Any, measured: Callable[[Any, Any], Measured], witnesses: list[Any]) -> list[str]:
    names = knobs_of(thing)
    if not names:
        return []
    plain = [measured(thing, witness) for witness in witnesses]
    return [name for name in names if not _matters(thing, name, measured, witnesses, plain)]


def _matters(
    thing: Any, name: str, measured: Callable[[Any, Any], Measured], witnesses: list[Any], plain: list[Measured]
) -> bool:
    for turned in _turned(thing, name):
        for witness, before in zip(witnesses, plain, strict=True):
            try:
                after = measured(turned, witness)
            except (ValueError, ZeroDivisionError, OverflowError):  # a number that its constructor would have refused
                return True
            if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True)):
                return True
    return False


def _losses(loss: Any, view: LossView) -> Measured:
    return [torch.where(view.valid_tokens, loss(view), 0.0).detach()]


def _contributions(callback: RLCallback, seen: Rollout) -> Measured:
    found = []
    for method in LATE if isinstance(seen, LossView) else EARLY:
        if method in callback.contributes:
            given = getattr(callback, method)(seen)
            if isinstance(given, LossTerm):
                found += [torch.where(seen.valid_tokens, given.per_token, 0.0).detach() * given.coef]
            else:
                found += [given.double()]
    return found


def _views(evidence: Evidence) -> Iterator[LossView]:
    """Views in which every two policies differ and rows are good and bad in turn."""
    rows = torch.arange(len(evidence.rows), device=evidence.rows.groups.device)
    for drift in DRIFTS:
        view = evidence.view(drift=drift).sanitize()
        good = torch.where(rows % 2 == 0, drift, -drift).sign()[:, None]
        advantages = (good * (1.5 + pattern_of(view))).to(view.logprobs.dtype)
        shifted = view.logprobs.detach() + (drift * torch.cos(2.0 * (rows // 2)))[:, None].to(view.logprobs.dtype)
        spread = _spread(view, abs(drift))
        yield spread.replace(
            advantages=torch.where(view.valid_tokens, advantages, 0.0),
            logprobs=torch.where(view.valid_tokens, shifted, 0.0),
        )  # fmt: skip


def _spread(rollout: Any, drift: float) -> Any:
    """A copy whose float fields differ, each by a pattern of its own over rows and tokens."""
    number, rows = iter(range(100)), torch.arange(len(rollout), device=rollout.groups.device)[:, None]

    def moved(tensor: Tensor, axes: str, _pad: float) -> Tensor:
        if axes != TOKEN or not tensor.is_floating_point() or tensor.dim() != 2:
            return tensor
        place = next(number)
        own = torch.sin(pattern_of(rollout) * (3.0 + place)) + torch.cos(1.7 * rows + 2.1 * place)
        kept = rollout.valid_tokens
        return torch.where(kept, tensor.detach().nan_to_num() + drift * own.to(tensor.dtype), 0.0)

    return rollout.map(moved)


def _rollouts(evidence: Evidence) -> list[Rollout]:
    """The groups with rewards that all differ, and as if the policies did."""
    groups = evidence.groups.sanitize()
    noise = 3.7 * torch.sin(1.0 + groups.sample_ids).to(groups.rewards.dtype)
    return [_spread(groups.replace(rewards=groups.rewards + noise), 1.0)]


def _dead_in_estimator(evidence: Evidence) -> list[str]:
    estimator, (witness,) = evidence.subject.estimator, _rollouts(evidence)
    rewarded = witness.rewarded & witness.valid_tokens.any(-1)
    most = torch.unique(witness.groups[rewarded], return_counts=True)[1]
    if not len(most) or int(most.max()) < FEW or int(witness.valid_tokens[rewarded].sum(-1).max()) < FEW:
        return []

    def measured(turned: Any, rollout: Rollout) -> Measured:
        other = replace(evidence, subject=evidence.subject.replaced(estimator=turned))
        found = other.signal(rollout)[0]
        return [found.required("advantages"), *([] if found.returns is None else [found.returns])]

    return _dead(estimator, measured, [witness])
