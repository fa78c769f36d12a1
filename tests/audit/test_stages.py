"""Contributions before the update depend only on their rows."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from kit.evidence import culprits, evidence_of
from kit.support import callback_of
from torch import Tensor

from lightning_rl import RLCallback, Rollout
from lightning_rl.audit import CHECKS
from lightning_rl.audit.evidence import Evidence
from lightning_rl.callbacks import DynamicSampling, NoEOSMask, OverlongPenalty, RewardNormalization
from lightning_rl.corrections import Stat
from lightning_rl.signal.masked import group_index


def group_mean(rollout: Rollout) -> Tensor:
    index, number = group_index(rollout.groups)
    totals = torch.zeros(number).index_add_(0, index, rollout.rewards)
    return (totals / torch.bincount(index))[index]


ACROSS = {
    "reward_bonus": lambda rollout: rollout.rewards - rollout.rewards.mean(),
    "reward_mask": lambda rollout: rollout.rewards >= rollout.rewards.median(),
    "keep_groups": lambda rollout: group_mean(rollout) == group_mean(rollout).max(),
    "exclude": lambda rollout: rollout.response_lengths == rollout.response_lengths.max(),
}


@pytest.mark.parametrize("method", ACROSS)
def test_what_compares_prompts_has_to_say_so(method: str) -> None:
    callback = callback_of("across", **{method: ACROSS[method]})
    assert culprits("contribution_groups", evidence_of(callback)) == [f"callback across.{method}"]
    assert culprits("contribution_rows", evidence_of(callback)) == []
    callback.batch_statistics = True
    assert culprits("contribution_groups", evidence_of(callback)) == []
    assert culprits("contribution_ranks", evidence_of(callback)) == [f"callback across.{method}"], "without collectives"


@pytest.mark.parametrize(
    "callback",
    [
        RewardNormalization(),
        RewardNormalization("group", "group"),
        RewardNormalization("none", "batch", clip=1.0),
        DynamicSampling(),
        NoEOSMask(),
        OverlongPenalty(5, 3),
        callback_of("grouped", keep_groups=lambda rollout: group_mean(rollout) > 1.0),
        callback_of("relative", reward_bonus=lambda rollout: rollout.rewards - group_mean(rollout)),
        callback_of("adaptive", rollout_metrics=lambda _: {"adaptive/coefficient": Stat.single(0.3)}),
        callback_of("longest", reward_bonus=lambda rollout: longest_first(rollout)),
    ],
    ids=lambda callback: callback.name,
)
def test_what_follows_its_rows_passes(callback: RLCallback) -> None:
    evidence = evidence_of(callback, ranks=2)
    for check in ("contribution_rows", "contribution_groups", "contribution_ranks", "contributions_fit"):
        assert culprits(check, evidence) == []


def longest_first(rollout: Rollout) -> Tensor:
    """Return 1 for the first of the longest answers to each prompt; ties may depend on the order."""
    bonus = torch.zeros(len(rollout))
    for group in rollout.groups.unique():
        rows = (rollout.groups == group).nonzero()[:, 0]
        bonus[rows[rollout.response_lengths[rows].argmax()]] = 1.0
    return bonus


def test_a_filter_that_splits_a_group_is_named() -> None:
    splitting = callback_of("splitting", keep_groups=lambda rollout: rollout.rewards > 1.0)
    findings = CHECKS["contribution_rows"](evidence_of(splitting))
    assert [finding.culprit for finding in findings] == ["callback splitting.keep_groups"]
    assert list(findings[0].samples) == [0, 1, 5, 6]


def test_a_reward_at_a_tie_is_no_finding() -> None:
    """Sums of 0.1 differ by order, so the mean of a group is on either side of the bound."""
    tenths = torch.tensor([0.1, 0.2, 0.3, 0.3, 0.2, 0.1, 0.2, 0.3, 0.1])
    mean = callback_of(
        "mean", keep_groups=lambda rollout: group_mean(rollout) > float(torch.tensor([0.1, 0.2, 0.3]).mean())
    )
    evidence = evidence_of(mean)
    rollout = evidence.groups.replace(rewards=tenths)
    evidence = Evidence(
        algorithm=evidence.algorithm, facts=evidence.facts, rollout=rollout, groups=rollout, rows=rollout
    )
    assert culprits("contribution_rows", evidence) == []


MERGING: dict[str, tuple[Any, int, bool]] = {
    "a population": (lambda r: Stat.of(r.response_lengths, r.real), 1, False),
    "a maximum": (lambda r: Stat.single(r.rewards.max()).maximum(), 2, False),
    "a count": (lambda r: Stat.single(len(r)).sum(), 2, False),
    "a mean of means on one rank": (lambda r: Stat.single(r.rewards.mean()), 1, False),
    "a mean of means on two ranks": (lambda r: Stat.single(r.rewards.mean()), 2, True),
    "a deviation from this rank's mean": (lambda r: Stat.of((r.rewards - r.rewards.mean()).abs(), r.real), 1, True),
    "the columns": (lambda r: Stat.of(r.response_ids == 0), 1, True),
}


@pytest.mark.parametrize("name", MERGING)
def test_a_metric_merges_over_ranks_and_counts_no_padding(name: str) -> None:
    figure, ranks, wrong = MERGING[name]

    def metrics(rollout: Rollout) -> Mapping[str, Stat]:
        return {"figures/one": figure(rollout)}

    evidence = evidence_of(callback_of("figures", rollout_metrics=metrics), ranks=ranks)
    found = culprits("contribution_ranks", evidence) + culprits("contribution_rows", evidence)
    assert bool(found) is wrong and all(culprit.startswith("callback figures.rollout_metrics") for culprit in found)


def test_ranks_that_differ_in_their_collectives_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_rl.audit.checks.stage_checks.PATIENCE", 0.5)

    def uneven(self: RLCallback, rollout: Rollout) -> Tensor:
        total = self.collectives.sum(rollout.rewards.sum()) if len(rollout) > 4 else rollout.rewards.sum()
        return rollout.rewards - total

    callback = type("Uneven", (RLCallback,), {"name": "uneven", "reward_bonus": uneven, "batch_statistics": True})()
    (finding,) = CHECKS["contribution_ranks"](evidence_of(callback))
    assert "the same collectives of callback uneven.reward_bonus" in finding.observed
