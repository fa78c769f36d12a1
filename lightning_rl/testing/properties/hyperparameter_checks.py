"""Check that every number passed to a loss, an estimator or a correction changes its result."""

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_rl.corrections import LossView, RLCallback
from lightning_rl.corrections.rl_callback import CONTRIBUTIONS
from lightning_rl.rollout import TOKEN, FinishReason, Rollout, RolloutT
from lightning_rl.testing.properties.case import (
    SHOWN_A_ROLLOUT,
    SHOWN_A_VIEW,
    AlgorithmCase,
    CorrectionMethod,
    pattern_of,
)
from lightning_rl.testing.properties.check import check
from lightning_rl.utils.finding import Finding

DRIFTS = (0.5, 3.0, -3.0, -0.5, 0.02)
MIN_TOKENS = 3  # in a row, for a discount to matter
TRAINED_METHODS = [name for name, entry in CONTRIBUTIONS.items() if entry.affects or entry.returns == "tensors"]
Measure = Callable[[Any, Any], list[Tensor]]
"""Function from a part of the algorithm and a test input to its results."""


@check(observed="the same result for every value", cure="use it in the formula, or remove it")
def knob_liveness(case: AlgorithmCase) -> Iterator[Finding]:
    """Every number passed to the constructor of the loss, the estimator or a correction changes some result."""
    algorithm, rows = case.algorithm, case.rows
    if len(rows) < MIN_TOKENS or int(rows.valid_tokens.sum(-1).max()) < MIN_TOKENS:
        return

    def losses(loss: Any, view: LossView) -> list[Tensor]:
        return [torch.where(view.valid_tokens, loss(view), 0.0).detach()]

    views, groups = list(_views(case)), case.groups.sanitize()
    noise = 3.7 * torch.sin(1.0 + groups.sample_ids).to(groups.rewards.dtype)
    ends = torch.where(groups.sample_ids % 2 == 0, FinishReason.LENGTH, groups.finish).to(groups.finish.dtype)
    rewarded = groups.trained & groups.valid_tokens.any(-1)  # reward all rows and truncate some
    groups = groups.replace(rewards=groups.rewards.nan_to_num() + noise, rewarded=rewarded, finish=ends)
    groups = _variation(groups, 1.0)  # different rewards and policies
    dead = [("estimator {estimator}", name) for name in _dead_in_estimator(case, groups)]
    if not algorithm.loss.prepares:
        dead = [("loss {loss}", name) for name in _dead_knobs(algorithm.loss, losses, views)] + dead
    for callback in algorithm.corrections.callbacks:
        if not callback.state_dict() and not callback.records:  # may be inactive for a while, or meant for the engine
            names = _dead_knobs(callback, _contributions, [groups, *views])
            dead += [(f"callback {callback.name}", name) for name in names]
    for culprit, name in dead:
        yield Finding(
            culprit=culprit.format(**case.names),
            expected=f"{name} to change something",
            cure=f"use self.{name} in the formula, or remove it",
        )


def knobs_of(thing: object) -> list[str]:
    """Return the names of numeric constructor arguments that differ from their default and are attributes."""
    slots = {name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())}
    held = slots.union(getattr(thing, "__dict__", {}))
    declared = set(dir(RLCallback)) if isinstance(thing, RLCallback) else set[str]()
    return [
        name
        for name, parameter in inspect.signature(type(thing).__init__).parameters.items()
        if name in held - declared and (value := getattr(thing, name)) != parameter.default
        if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    ]


def _variants(thing: Any, name: str) -> Iterator[Any]:
    """Yield copies with another value of an attribute."""
    value = getattr(thing, name)
    below = () if isinstance(value, int) else (value - 10,)  # counts are not negative
    for other in (value * 2 + 1, value / 2, 1.0, 0.05, 0.0, value + 10, *below, value * 16 + 1):
        number = int(other) if isinstance(value, int) and math.isfinite(other) else other
        if number != value:
            variant = copy.copy(thing)
            object.__setattr__(variant, name, number)
            yield variant


def _dead_knobs(thing: Any, measure: Measure, witnesses: Sequence[Any]) -> list[str]:
    names = knobs_of(thing)
    plain = [(witness, measure(thing, witness)) for witness in witnesses] if names else []

    def differs(variant: Any, witness: Any, before: list[Tensor]) -> bool:
        try:
            after = measure(variant, witness)
        except (ValueError, ZeroDivisionError, OverflowError):  # the constructor would reject the number
            return True
        return any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))

    return [
        name for name in names if not any(differs(other, *pair) for other in _variants(thing, name) for pair in plain)
    ]


def _contributions(callback: RLCallback, rows: Rollout) -> list[Tensor]:
    shown = SHOWN_A_VIEW if isinstance(rows, LossView) else (*SHOWN_A_ROLLOUT, "provide")
    methods = [method for method in TRAINED_METHODS if method in shown and method in callback.contributes]
    tensors = dict[str, Tensor]()
    for method in methods:
        tensors |= {f"{method} {name}": one for name, one in CorrectionMethod(callback, method).tensors(rows).items()}
    if "loss_term" in methods:
        tensors["loss_term loss_term"] = torch.where(rows.valid_tokens, tensors["loss_term loss_term"], 0.0)
    return [tensors[name].double() for name in sorted(tensors)]


def _views(case: AlgorithmCase) -> Iterator[LossView]:
    """Yield views with different policies and alternating good and bad rows."""
    rows = torch.arange(len(case.rows), device=case.rows.groups.device)
    for drift in DRIFTS:
        view = case.view(drift=drift).sanitize()
        good = torch.where(rows % 2 == 0, drift, -drift).sign()[:, None]
        advantages = (good * (1.5 + pattern_of(view))).to(view.logprobs.dtype)
        shifted = view.logprobs.detach() + (drift * torch.cos(2.0 * (rows // 2)))[:, None].to(view.logprobs.dtype)
        yield _variation(view, abs(drift)).replace(
            advantages=torch.where(view.valid_tokens, advantages, 0.0),
            logprobs=torch.where(view.valid_tokens, shifted, 0.0),
        )


def _variation(rollout: RolloutT, drift: float) -> RolloutT:
    """Return a copy whose float fields differ, each by a different pattern over rows and tokens."""
    number, rows = iter(range(100)), torch.arange(len(rollout), device=rollout.groups.device)[:, None]

    def move(tensor: Tensor, axis: object, _pad: float) -> Tensor:
        if axis != TOKEN or not tensor.is_floating_point() or tensor.dim() != 2:
            return tensor
        place = next(number)
        pattern = torch.sin(pattern_of(rollout) * (3.0 + place)) + torch.cos(1.7 * rows + 2.1 * place)
        moved = tensor.detach().nan_to_num() + drift * pattern.to(tensor.dtype)
        return torch.where(rollout.valid_tokens, moved, 0.0)

    return rollout.map(move)


def _dead_in_estimator(case: AlgorithmCase, witness: Rollout) -> list[str]:
    rewarded = witness.rewarded & witness.valid_tokens.any(-1)
    sizes = torch.unique(witness.groups[rewarded], return_counts=True)[1]
    longest = [sizes.max(), witness.valid_tokens[rewarded].sum(-1).max()] if len(sizes) else [0]
    if min(map(int, longest)) < MIN_TOKENS:
        return []

    def measure(estimator: Any, rollout: Rollout) -> list[Tensor]:
        other = replace(case, algorithm=case.algorithm.replace(advantages=estimator))
        signalled = other.signal(rollout)[0]
        return [signalled.require("advantages"), *([] if signalled.returns is None else [signalled.returns])]

    return _dead_knobs(case.algorithm.advantages, measure, [witness])
