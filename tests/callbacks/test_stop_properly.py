"""StopProperly: a truncated response keeps a part of its reward, or gets another one, and stays in its group."""

import math
from typing import Any

import pytest
import torch
from kit.support import rollout_of

from lightning_rl import FinishReason, Rollout
from lightning_rl.advantages import GRPO, DrGRPO
from lightning_rl.callbacks import StopProperly
from lightning_rl.corrections import Corrections
from lightning_rl.rollouts.estimate_signal import estimate_signal


def samples(rewards: list[float], **given: Any) -> Rollout:
    """Rows of one token and one group, the first of which was truncated."""
    finish = torch.tensor([FinishReason.LENGTH] + [FinishReason.STOP] * (len(rewards) - 1), dtype=torch.uint8)
    return rollout_of(rewards, [[1]] * len(rewards), finish=finish, **given)


@pytest.mark.parametrize(
    ("options", "reward", "expected"),
    [
        ({}, 2.0, 0.0),
        ({"scale": 0.25}, 2.0, 0.5),
        ({"scale": 0.25}, -2.0, -0.5),
        ({"scale": 1.0}, 2.0, 2.0),
        ({"reward": -0.5}, 2.0, -0.5),
        ({"scale": 0.25, "reward": 0.0}, 2.0, 0.0),
    ],
)
def test_only_what_was_truncated_changes(options: Any, reward: float, expected: float) -> None:
    correction, rollout = StopProperly(**options), samples([reward, reward])
    assert correction.replace_reward(rollout).tolist() == [expected, reward]
    assert correction.rollout_metrics(rollout)["stop_properly/truncated"].value() == 0.5


def test_a_conversation_without_turns_left_was_truncated_as_well() -> None:
    ends = torch.tensor([FinishReason.TURNS, FinishReason.STOP, FinishReason.LENGTH], dtype=torch.uint8)
    rollout = rollout_of([2.0, 2.0, 2.0], [[1]] * 3, finish=ends)
    assert StopProperly().replace_reward(rollout).tolist() == [0.0, 2.0, 0.0]
    assert StopProperly().rollout_metrics(rollout)["stop_properly/truncated"].value() == pytest.approx(2 / 3)


def test_the_row_takes_part_in_the_baseline_with_its_new_reward() -> None:
    found = estimate_signal(samples([1.0, 1.0]), DrGRPO(), Corrections([StopProperly(0.5)]))[0]
    assert found.require("advantages").flatten().tolist() == [-0.25, 0.25]


def test_a_row_without_reward_gets_none() -> None:
    rollout = samples([math.nan, 1.0]).replace(rewarded=torch.tensor([False, True]))
    assert Corrections([StopProperly(reward=-1.0)]).scores(rollout).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("options", [{"reward": -1.0}, {"reward": -0.1}, {"scale": 0.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_leave_no_residue(options: Any, dtype: torch.dtype) -> None:
    rewards = torch.tensor([0.1, 0.7, 1e-3, 1e8, 0.3, 1 / 3, 2.0, -0.9], dtype=dtype)
    finish = torch.full((8,), FinishReason.LENGTH, dtype=torch.uint8)
    rollout = rollout_of(rewards.tolist(), [[1]] * 8, finish=finish).replace(rewards=rewards)
    found, _, stats = estimate_signal(rollout, GRPO(), Corrections([StopProperly(**options)]))
    assert found.require("advantages").eq(0).all() and stats["groups/zero_variance"].value() == 1.0
