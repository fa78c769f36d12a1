"""Returns along the valid tokens of a row: discounts over holes, and the value of the step after a truncated row."""

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from lightning_rl import ReinforcePlusPlus, ReMax
from lightning_rl.advantages import RewardSignal
from lightning_rl.signal.discounted_returns import discounted_returns, gae

NAN = math.nan
HOLES = torch.tensor([[True, False, True, False, True]])


@pytest.mark.parametrize(
    ("rewards", "valid", "gamma", "returns"),
    [
        pytest.param([0, 0, 1], [1, 1, 1], 1.0, [1, 1, 1], id="undiscounted"),
        pytest.param([0, 0, 1], [1, 1, 1], 0.5, [0.25, 0.5, 1], id="discounted"),
        pytest.param([4, 2, 1], [1, 1, 1], 0.0, [4, 2, 1], id="myopic"),
        pytest.param([0, 7, 0, 7, 1], [1, 0, 1, 0, 1], 0.5, [0.25, 0, 0.5, 0, 1], id="a-hole-costs-no-discount"),
        pytest.param([1, NAN, 2, math.inf], [1, 0, 1, 0], 0.5, [2, 0, 2, 0], id="poison-in-holes"),
        pytest.param([3, 3], [0, 0], 0.5, [0, 0], id="no-valid-token"),
        pytest.param([], [], 0.5, [], id="no-tokens"),
    ],
)
def test_discounted_returns_by_hand(rewards: list[float], valid: list[int], gamma: float, returns: list[float]) -> None:
    given = torch.tensor([rewards], dtype=torch.float64)
    found = discounted_returns(given, torch.tensor([valid], dtype=torch.bool), gamma=gamma)
    assert_close(found, torch.tensor([returns], dtype=torch.float64))


def test_a_bootstrap_stands_in_for_what_follows_the_last_valid_token() -> None:
    rewards, values = torch.tensor([[0.0, 9.0, 1.0, 9.0, 0.0]]), torch.tensor([[0.5, 9.0, 0.25, 9.0, 1.0]])
    found = gae(rewards, values, HOLES, gamma=0.5, lam=0.5, bootstrap=torch.tensor([4.0]))
    last = 0.0 + 0.5 * 4.0 - 1.0
    middle = 1.0 + 0.5 * 1.0 - 0.25 + 0.25 * last
    first = 0.0 + 0.5 * 0.25 - 0.5 + 0.25 * middle
    assert_close(found, torch.tensor([[first, 0.0, middle, 0.0, last]]))


def test_a_bootstrap_of_0_is_none_and_one_row_has_its_own() -> None:
    draw = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 4, generator=draw, dtype=torch.float64).unbind()
    valid = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    plain = gae(rewards, values, valid, gamma=0.9)
    assert torch.equal(gae(rewards, values, valid, gamma=0.9, bootstrap=torch.zeros(3).double()), plain)
    one = gae(rewards, values, valid, gamma=0.9, bootstrap=torch.tensor([0.0, 1.0, 1.0]).double())
    assert torch.equal(one[[0, 2]], plain[[0, 2]])
    assert_close(one[1, 0], plain[1, 0] + 0.9)


@pytest.mark.parametrize("gamma", [-0.1, 1.01, NAN])
def test_a_discount_outside_0_to_1_is_refused(gamma: float) -> None:
    row = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=rf"expected gamma in \[0, 1\], got {gamma}"):
        discounted_returns(row, row.bool(), gamma=gamma)
    with pytest.raises(ValueError, match=rf"expected gamma in \[0, 1\], got {gamma}"):
        ReinforcePlusPlus(gamma=gamma)


def signal(**given: Any) -> RewardSignal:
    shaped = torch.tensor([[0.0, 5.0, 1.0], [0.5, 3.0, 5.0]], dtype=torch.float64)
    known: dict[str, Any] = {
        "scores": torch.zeros(2),
        "rewarded": torch.ones(2).bool(),
        "groups": torch.zeros(2).long(),
        "valid_tokens": torch.tensor([[1, 0, 1], [1, 1, 0]], dtype=torch.bool),
        "token_rewards": torch.zeros(2, 3),
        "shaped": shaped,
        **given,
    }
    return RewardSignal(**known)


def test_remax_subtracts_the_greedy_score_from_each_token() -> None:
    found = ReMax()(signal(greedy=torch.tensor([0.25, 2.0], dtype=torch.float64))).advantages
    assert_close(found, torch.tensor([[0.75, 0.0, 0.75], [1.5, 1.0, 0.0]], dtype=torch.float64))
    none = ReMax()(signal(greedy=torch.tensor([0.25, NAN]).double(), rewarded=torch.tensor([True, False]))).advantages
    assert_close(none[1], torch.tensor([3.5, 3.0, 0.0], dtype=torch.float64))
    with pytest.raises(ValueError, match="expected the score of a greedy answer for ReMax, got none"):
        ReMax()(signal())


def test_reinforce_plus_plus_whitens_the_returns_of_rewarded_rows() -> None:
    found = ReinforcePlusPlus(gamma=0.5)(signal()).advantages
    returns = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    white = (returns - returns.mean()) / returns.std()
    assert_close(found, torch.tensor([[white[0], 0.0, white[1]], [white[2], white[3], 0.0]], dtype=torch.float64))
    partly = ReinforcePlusPlus(gamma=0.5)(signal(rewarded=torch.tensor([True, False]))).advantages
    assert_close(partly[0, [0, 2]], torch.tensor([-1.0, 1.0], dtype=torch.float64) * math.sqrt(0.5))
    assert_close(partly[1, :2], returns[2:] / returns[:2].std())  # scaled, not shifted
