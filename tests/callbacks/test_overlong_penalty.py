"""OverlongPenalty: linear within the cache, -1 beyond the maximum, part of the reward before normalisation."""

from typing import Any

import pytest
import torch
from kit.support import ragged_rollout

from lightning_rl import GRPO
from lightning_rl.callbacks import NoEOSMask, OverlongPenalty
from lightning_rl.corrections import Corrections
from lightning_rl.rollouts.estimate_signal import estimate_signal


def rollout_of_lengths(*lengths: int) -> Any:
    rollout = ragged_rollout(len(lengths), group_size=len(lengths), longest=max(lengths))
    number = torch.tensor(lengths)
    inside = torch.arange(max(lengths)) < number[:, None]
    whole = {"action_mask": inside, "valid_tokens": inside, "rewards": torch.zeros(len(lengths))}
    return rollout.replace(response_lengths=number, **whole)


@pytest.mark.parametrize(("length", "penalty"), [(6, 0.0), (7, -0.25), (8, -0.5), (9, -0.75), (10, -1.0), (12, -1.0)])
def test_falls_linearly_within_the_cache(length: int, penalty: float) -> None:
    bonus = OverlongPenalty(10, 4).reward_bonus(rollout_of_lengths(length, 1))
    assert bonus.tolist() == [penalty, 0.0]


def test_enters_the_reward_before_the_group_is_normalised() -> None:
    rollout = rollout_of_lengths(10, 6)
    found, _, stats = estimate_signal(rollout, GRPO(), Corrections([OverlongPenalty(10, 4, coef=2.0)]))
    assert stats["reward/shaped"].value() == -1.0 and not rollout.rewards.any()
    advantages = found.require("advantages")
    assert float(advantages[0, 0]) == pytest.approx(-0.7071, abs=1e-4) == -float(advantages[1, 0])


def test_a_row_without_reward_keeps_the_penalty_but_moves_nothing_in_its_group() -> None:
    rollout = rollout_of_lengths(10, 6).replace(rewarded=torch.tensor([False, True]))
    found, _, stats = estimate_signal(rollout, GRPO(), Corrections([OverlongPenalty(10, 4), NoEOSMask()]))
    assert stats["reward/shaped"].value() == -0.5
    assert not found.require("advantages").any()


def test_logs_mean_and_share() -> None:
    logged = OverlongPenalty(10, 4).rollout_metrics(rollout_of_lengths(10, 8, 6, 1))
    assert logged["overlong_penalty/penalty"].value() == -0.375
    assert logged["overlong_penalty/punished"].value() == 0.5
