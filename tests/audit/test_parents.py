"""Subclasses of the library's corrections keep what their parents document; filters decide what trains."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.evidence import culprits, evidence_of
from torch import Tensor
from typing_extensions import override

from lightning_rl import RLCallback, Rollout
from lightning_rl.audit import CHECKS
from lightning_rl.callbacks import AdaptiveKL, EntropyBonus, NoEOSMask, OverlongPenalty


class Renamed(NoEOSMask):
    """As its parent."""


class Everything(NoEOSMask):
    """Keeps all rows."""

    @override
    def reward_mask(self, rollout: Rollout) -> Tensor:
        return torch.ones_like(rollout.truncated)


class Drops(NoEOSMask):
    """Excludes finished rows."""

    @override
    def exclude(self, rollout: Rollout) -> Tensor:
        return ~rollout.truncated


class Whole(OverlongPenalty):
    """Counts prompts and responses."""

    @override
    def reward_bonus(self, rollout: Rollout) -> Tensor:
        excess = rollout.sampled_lengths + rollout.prompt_lengths - self.max_length + self.cache
        return -(excess / self.cache).clamp(0.0, 1.0).to(rollout.rewards.dtype)


class Lowers(AdaptiveKL):
    """Divides by the factor of its parent."""

    @override
    def adapt(self, measured: float, number: int) -> None:
        before = self.beta
        super().adapt(measured, number)
        self.beta = before**2 / self.beta


class Falls(EntropyBonus):
    """Subtracts the step of its parent."""

    @override
    def adapt(self, moments: Tensor) -> None:
        before = self.coef
        super().adapt(moments)
        self.coef = 2 * before - self.coef


class Slower(AdaptiveKL):
    """Moves half as far."""

    @override
    def adapt(self, measured: float, number: int) -> None:
        super().adapt(measured, number // 2)


def controller(parent: type[RLCallback], **methods: Any) -> RLCallback:
    """Return a subclass of a controller with other methods."""
    options = {"as_loss": True, "target": 0.01} if parent is AdaptiveKL else {"target": 1.0}
    return type("Own", (parent,), methods)(0.1, **options)


def watch_rewards(self: AdaptiveKL, rollout: Rollout) -> None:
    self.adapt(float(rollout.rewards.mean()), len(rollout))


def watch_twice(self: AdaptiveKL, rollout: Rollout) -> None:
    AdaptiveKL.observe(self, rollout)
    AdaptiveKL.observe(self, rollout)


def smooth(self: AdaptiveKL, rollout: Rollout) -> None:
    before = self.beta
    AdaptiveKL.observe(self, rollout)
    self.beta = before + (self.beta - before) / 3


def watch_the_norm(self: EntropyBonus, outputs: Any) -> None:
    self.coef += self.step if float(outputs["optim/grad_norm"]) < 2.0 else -self.step


@pytest.mark.parametrize(
    ("callback", "culprit"),
    [
        (Renamed("drop_tokens"), None),
        (Slower(0.1, target=0.01, as_loss=True), None),
        (type("Own", (OverlongPenalty,), {})(4, 2), None),
        (type("Own", (EntropyBonus,), {})(0.1, target=1.0), None),
        (Everything(), "no_eos_mask.reward_mask"),
        (Drops(), "no_eos_mask.exclude"),
        (Whole(5, 2), "overlong_penalty.reward_bonus"),
        (Lowers(0.1, target=0.01, as_loss=True), "adaptive_kl.adapt"),
        (Falls(0.1, target=1.0), "entropy_bonus.adapt"),
        (AdaptiveKL(0.1, target=0.01, as_loss=True), None),
        (AdaptiveKL(0.1, target=5.0, as_loss=True, estimator="k2"), None),
        (EntropyBonus(0.0, target=1.0), None),
        (controller(AdaptiveKL, observe=smooth), None),
        (controller(AdaptiveKL, observe=lambda *_: None), "adaptive_kl.observe"),
        (controller(AdaptiveKL, observe=watch_rewards), "adaptive_kl.observe"),
        (controller(AdaptiveKL, observe=watch_twice), "adaptive_kl.observe"),
        (controller(AdaptiveKL, adapt=lambda *_: None), "adaptive_kl.adapt"),
        (controller(EntropyBonus, after_step=lambda *_: None), "entropy_bonus.after_step"),
        (controller(EntropyBonus, after_step=watch_the_norm), "entropy_bonus.after_step"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, RLCallback) else "",
)
def test_a_subclass_keeps_what_its_parent_documents(callback: RLCallback, culprit: str | None) -> None:
    found = culprits("parent_promises", evidence_of(callback))
    assert found == ([] if culprit is None else [f"callback {culprit}"])


def at_least(limit: float) -> RLCallback:
    """Return a filter that keeps groups with a reward of at least a limit."""

    def keep_groups(_: Any, rows: Rollout) -> Tensor:
        return torch.isin(rows.groups, rows.groups[rows.rewards >= limit])

    return type("Best", (RLCallback,), {"name": "best", "keep_groups": keep_groups})()


@pytest.mark.parametrize(
    ("groups", "limit", "wrong"),
    [([0, 1, 2], 1.0, False), ([0], 2.5, False), ([2], 3.5, False), ([1, 2], 3.5, True), ([0], 3.5, True)],
)
def test_groups_that_a_filter_drops_do_not_train(groups: list[int], limit: float, wrong: bool) -> None:
    evidence = evidence_of(at_least(limit))
    few = evidence.rollout.select(torch.isin(evidence.rollout.groups, torch.tensor(groups)))
    facts = replace(evidence.facts, group_size=3, groups=3)
    evidence = replace(evidence, facts=facts, rounds=[evidence.rollout], rollout=few)
    found = [finding.expected for finding in CHECKS["sample_conservation"](evidence)]
    assert any("best.keep_groups" in expected for expected in found) is wrong
