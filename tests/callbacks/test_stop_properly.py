"""StopProperly: a truncated response keeps a part of its reward, or gets another one, and stays in its group."""

import math
from typing import Any

import pytest
import torch
from kit.support import rollout_of

from lightning_rl import FinishReason, Rollout
from lightning_rl.advantages import DrGRPO
from lightning_rl.callbacks import StopProperly
from lightning_rl.corrections import Corrections
from lightning_rl.rollouts.estimate_signal import estimate_signal


def samples(rewards: list[float], **given: Any) -> Rollout:
    """Rows of one token and one group, the first of which was truncated."""
    finish = torch.tensor([FinishReason.LENGTH] + [FinishReason.STOP] * (len(rewards) - 1), dtype=torch.uint8)
    return rollout_of(rewards, [[1]] * len(rewards), finish=finish, **given)


@pytest.mark.parametrize(
    ("options", "reward", "bonus"),
    [
        ({}, 2.0, -2.0),
        ({"scale": 0.25}, 2.0, -1.5),
        ({"scale": 0.25}, -2.0, 1.5),
        ({"scale": 1.0}, 2.0, 0.0),
        ({"reward": -0.5}, 2.0, -2.5),
        ({"scale": 0.25, "reward": 0.0}, 2.0, -2.0),
    ],
)
def test_only_what_was_truncated_changes(options: Any, reward: float, bonus: float) -> None:
    correction, rollout = StopProperly(**options), samples([reward, reward])
    assert correction.reward_bonus(rollout).tolist() == [bonus, 0.0]
    assert correction.rollout_metrics(rollout)["stop_properly/truncated"].value() == 0.5


def test_a_conversation_without_turns_left_was_truncated_as_well() -> None:
    ends = torch.tensor([FinishReason.TURNS, FinishReason.STOP, FinishReason.LENGTH], dtype=torch.uint8)
    rollout = rollout_of([2.0, 2.0, 2.0], [[1]] * 3, finish=ends)
    assert StopProperly().reward_bonus(rollout).tolist() == [-2.0, 0.0, -2.0]
    assert StopProperly().rollout_metrics(rollout)["stop_properly/truncated"].value() == pytest.approx(2 / 3)


def test_the_row_takes_part_in_the_baseline_with_its_new_reward() -> None:
    found = estimate_signal(samples([1.0, 1.0]), DrGRPO(), Corrections([StopProperly(0.5)]))[0]
    assert found.require("advantages").flatten().tolist() == [-0.25, 0.25]


def test_a_row_without_reward_gets_none() -> None:
    rollout = samples([math.nan, 1.0]).replace(rewarded=torch.tensor([False, True]))
    assert StopProperly(reward=-1.0).reward_bonus(rollout).tolist() == [0.0, 0.0]
