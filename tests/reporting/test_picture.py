"""Picture of a rollout: rewards by group and log-probabilities by token, for rollouts that lack some fields."""

import sys

import pytest
import torch
from kit.support import rollout_of

from lightning_rl.reporting.picture import group_rewards, rollout_picture, token_logprobs

NAN = float("nan")


def test_groups_and_samples_are_sorted_by_reward() -> None:
    rollout = rollout_of(
        [1.0, 0.0, 5.0, 0.5, 0.0, 9.0], [[1]] * 6, groups=[4, 4, 4, 7, 7, 7], rewarded=[True] * 5 + [False]
    )
    expected = torch.tensor([[0.0, 0.5, NAN], [0.0, 1.0, 5.0]])
    assert torch.equal(group_rewards(rollout).nan_to_num(-1), expected.nan_to_num(-1))


def test_only_tokens_that_the_policy_drew_have_a_colour() -> None:
    rollout = rollout_of([0.0, 0.0, 0.0], [[1, 1, 1], [1, 0, 0], [1, 1, 0]])
    logprobs = -torch.arange(9.0).reshape(3, 3)
    shown = token_logprobs(rollout.replace(rollout_logprobs=logprobs), [2, 1])
    assert torch.equal(shown.nan_to_num(1), torch.tensor([[-6.0, -7.0], [-3.0, 1.0]]))
    asked = token_logprobs(rollout.replace(rollout_logprobs=logprobs, old_logprobs=logprobs * 2), [0])
    assert torch.equal(asked, torch.tensor([[0.0, -2.0, -4.0]]))


@pytest.mark.parametrize("rewarded", [True, False])
def test_a_picture_is_drawn_of_any_rollout(rewarded: bool) -> None:
    pytest.importorskip("matplotlib")
    rollout = rollout_of([0.0, 0.0], [[0], [1]], rewarded=[rewarded] * 2)
    picture = rollout_picture(rollout, [0, 1])
    assert picture is not None and picture.shape == (240, 800, 3) and picture.std() > 0


def test_without_matplotlib_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert rollout_picture(rollout_of([0.0], [[1]]), [0]) is None
