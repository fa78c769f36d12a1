"""LinearLengthPenalty: parts of the group's longest response, times the group's mean reward."""

from typing import Any

import pytest
import torch
from kit.support import fit, rollout_of, tiny_module

from lightning_rl import Rollout
from lightning_rl.callbacks import LinearLengthPenalty


def two_groups() -> Rollout:
    """A group that is solved by two of three, and one that is never solved; tokens 4, 2, 1 and 3, 1."""
    masks = [[1, 1, 0, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
    rollout = rollout_of([1.0, 0.0, 1.0, 0.0, 0.0], masks, groups=[0, 0, 0, 1, 1])
    return rollout.replace(
        prompt_lengths=torch.ones(5, dtype=torch.int64), response_lengths=torch.tensor([5, 2, 2, 3, 1])
    )


@pytest.mark.parametrize(
    ("options", "costs"),
    [
        pytest.param({"tokens": 0.3}, [0.3, 0.15, 0.075], id="tokens-4-2-1"),
        pytest.param({"tokens": 0.0, "context": 0.2}, [0.2, 0.1, 0.2], id="context-2-1-2"),
        pytest.param({"tokens": 0.0, "turns": 0.6}, [0.6, 0.3, 0.3], id="turns-2-1-1"),
        pytest.param({"tokens": 0.3, "context": 0.2, "turns": 0.6}, [1.1, 0.55, 0.575], id="all"),
    ],
)
def test_each_part_is_of_the_groups_longest_times_its_mean_reward(options: Any, costs: list[float]) -> None:
    found = LinearLengthPenalty(**options).reward_bonus(two_groups()).tolist()
    assert found == pytest.approx([-2 / 3 * cost for cost in costs] + [0.0, 0.0])


def test_rows_without_reward_have_no_penalty_and_set_none() -> None:
    rollout = two_groups().replace(rewarded=torch.tensor([False, True, True, True, True]))
    found = LinearLengthPenalty(0.3).reward_bonus(rollout).tolist()
    assert found == pytest.approx([0.0, -0.15, -0.075, 0.0, 0.0])  # of 2 tokens, and a mean reward of 1/2
    logged = LinearLengthPenalty(0.3).rollout_metrics(rollout)["linear_length_penalty/penalty"].value()
    assert logged == pytest.approx(-0.225 / 4)


def test_it_needs_groups() -> None:
    with pytest.raises(ValueError, match="LinearLengthPenalty compares the samples of a prompt"):
        fit(tiny_module(group_size=1, advantages="reinforce"), callbacks=[LinearLengthPenalty()])
