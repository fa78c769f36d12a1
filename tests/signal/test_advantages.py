"""Group estimators: one number for each row, from the rewarded rows of its own group alone."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import grpo, reinforce, rloo
from lightning_rl.advantages import ESTIMATORS, PerRow, resolve_advantages
from lightning_rl.signal.advantages import group_statistics

NAN, INF = math.nan, math.inf
HALF = math.sqrt(0.5)
Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]
each = pytest.mark.parametrize("estimator", [grpo, rloo, reinforce])
centred = pytest.mark.parametrize("estimator", [grpo, rloo])


def advantages(
    estimator: Estimator, scores: list[float], groups: list[int] | None = None, rewarded: list[int] | None = None
) -> Tensor:
    everyone = [1] * len(scores) if rewarded is None else rewarded
    ids = torch.tensor([0] * len(scores) if groups is None else groups, dtype=torch.int64)
    return estimator(torch.tensor(scores), ids, torch.tensor(everyone, dtype=torch.bool))


@pytest.mark.parametrize(
    ("estimator", "scores", "groups", "rewarded", "expected"),
    [
        pytest.param(grpo, [1, 0], [0, 0], [1, 1], [HALF, -HALF], id="grpo-pair"),
        pytest.param(grpo, [1, 0, 3], [0, 0, 1], [1, 1, 1], [HALF, -HALF, 0], id="grpo-singleton"),
        pytest.param(
            grpo,
            [1, 0, 1, 0, 0, 0, 0],
            [0, 0, 0, 0, 1, 1, 1],
            [1] * 7,
            [0.866, -0.866, 0.866, -0.866, 0, 0, 0],
            id="grpo-groups-of-4-and-3",
        ),
        pytest.param(grpo, [1, 5, 0, 7], [3, 9, 3, 9], [1] * 4, [HALF, -HALF, -HALF, HALF], id="grpo-interleaved"),
        pytest.param(grpo, [1, 0, 1, -100], [0] * 4, [1, 1, 1, 0], [0.577, -1.155, 0.577, 0], id="grpo-row-left-out"),
        pytest.param(grpo, [1, 0, NAN], [0] * 3, [1, 1, 0], [HALF, -HALF, 0], id="grpo-nan-left-out"),
        pytest.param(grpo, [1, 0, INF], [0] * 3, [1, 1, 0], [HALF, -HALF, 0], id="grpo-infinity-left-out"),
        pytest.param(grpo, [1, 100], [0, 0], [1, 0], [0, 0], id="grpo-one-rewarded-row"),
        pytest.param(grpo, [1, 100], [0, 0], [0, 0], [0, 0], id="grpo-no-rewarded-row"),
        pytest.param(grpo, [1.0, 1.00001], [0, 0], [1, 1], [-0.6196, 0.6196], id="grpo-small-spread"),
        pytest.param(rloo, [1, 0, 2], [0] * 3, [1] * 3, [0, -1.5, 1.5], id="rloo"),
        pytest.param(rloo, [1, 0, 2, 9], [0] * 4, [1, 1, 1, 0], [0, -1.5, 1.5, 0], id="rloo-row-left-out"),
        pytest.param(rloo, [5, 1], [0, 0], [1, 0], [0, 0], id="rloo-one-rewarded-row"),
        pytest.param(rloo, [1, 0, 7], [0, 0, 1], [1] * 3, [1, -1, 0], id="rloo-singleton"),
        pytest.param(reinforce, [1, 0, 2], [0, 0, 1], [1] * 3, [1, 0, 2], id="reinforce"),
        pytest.param(reinforce, [1, NAN], [0, 0], [1, 0], [1, 0], id="reinforce-nan-left-out"),
        pytest.param(grpo, [], [], [], [], id="grpo-no-rows"),
        pytest.param(rloo, [], [], [], [], id="rloo-no-rows"),
    ],
)
def test_estimators_give_the_hand_worked_numbers(
    estimator: Estimator, scores: list[float], groups: list[int], rewarded: list[int], expected: list[float]
) -> None:
    found = advantages(estimator, [float(score) for score in scores], groups, rewarded)
    assert found.dtype == torch.float32
    assert_close(found, torch.tensor([float(value) for value in expected]), atol=6e-4, rtol=0)
    assert found.count_nonzero() == sum(value != 0 for value in expected)


@centred
@pytest.mark.parametrize("number", [2, 3, 11, 1000])
@pytest.mark.parametrize("constant", [1.1, 0.1, -2.7, 1e8])
def test_equal_rewards_give_exactly_0(estimator: Estimator, constant: float, number: int) -> None:
    assert advantages(estimator, [constant] * number).count_nonzero() == 0


@centred
def test_a_large_offset_costs_no_precision(estimator: Estimator) -> None:
    scores, offset = [0.0, 1.0, 4.0], 2.0**20
    assert_close(advantages(estimator, [score + offset for score in scores]), advantages(estimator, scores))


@each
@pytest.mark.parametrize("poison", [NAN, INF])
def test_a_broken_reward_of_a_rewarded_row_is_not_hidden_as_0(estimator: Estimator, poison: float) -> None:
    found = advantages(estimator, [1.0, poison, 0.0, 5.0, 7.0], [0, 0, 0, 1, 1])
    assert not found[1].isfinite()
    assert found[3:].isfinite().all()


@each
@given(
    rewards=st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 2), st.booleans()), min_size=1, max_size=12),
    change=st.integers(-100, 100),
)
def test_groups_and_rewarded_rows_are_isolated(
    estimator: Estimator, rewards: list[tuple[int, int, bool]], change: int
) -> None:
    scores = torch.tensor([float(score) for score, _, _ in rewards])
    groups = torch.tensor([group for _, group, _ in rewards])
    rewarded = torch.tensor([kept for _, _, kept in rewards])
    elsewhere = (groups == 0) | ~rewarded
    before = estimator(scores, groups, rewarded)
    after = estimator(torch.where(elsewhere, scores * change - change, scores), groups, rewarded)
    assert torch.equal(before[~elsewhere], after[~elsewhere])
    assert (after[~rewarded] == 0).all()


@given(
    scores=st.lists(st.integers(-20, 20), min_size=2, max_size=9).filter(lambda found: len(set(found)) > 1),
    shift=st.integers(-1000, 1000),
    scale=st.sampled_from([0.5, 2.0, 64.0]),
)
def test_a_shift_changes_nothing_and_a_scale_what_it_should(scores: list[int], shift: int, scale: float) -> None:
    plain, moved = [float(score) for score in scores], [score * scale + shift for score in scores]
    assert_close(advantages(grpo, moved), advantages(grpo, plain), atol=1e-4, rtol=1e-4)  # epsilon does not scale
    assert_close(advantages(rloo, moved), scale * advantages(rloo, plain))
    assert math.isclose(float(advantages(rloo, plain).sum()), 0, abs_tol=1e-3)


@each
def test_rows_may_come_in_any_order(estimator: Estimator) -> None:
    scores, groups = torch.tensor([1.0, 0.0, 3.0, 2.0, 5.0]), torch.tensor([4, 4, 2, 2, 2])
    rewarded, order = torch.tensor([True, True, True, False, True]), torch.tensor([3, 0, 4, 1, 2])
    found = estimator(scores, groups, rewarded)
    assert_close(estimator(scores[order], groups[order], rewarded[order]), found[order])


def test_group_statistics_are_those_of_the_rewarded_rows() -> None:
    found = group_statistics(
        torch.tensor([1.0, 4.0, NAN, 7.0]), torch.tensor([0, 0, 0, 5]), torch.tensor([True, True, False, True])
    )
    assert found.number.tolist() == [2, 2, 2, 1]
    assert found.mean.tolist() == [2.5, 2.5, 2.5, 7.0]
    assert_close(found.std(), torch.tensor([4.5, 4.5, 4.5, 0.0], dtype=torch.float64).sqrt())
    assert found.spread.tolist() == [True, True, False, False]


def test_epsilon_is_added_to_the_deviation() -> None:
    pair = torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([True, True])
    assert_close(grpo(*pair, epsilon=1.0), torch.tensor([0.5, -0.5]) / (HALF + 1))


def test_names_resolve_and_an_unknown_one_lists_them() -> None:
    assert all(resolve_advantages(name) is estimator for name, estimator in ESTIMATORS.items())
    assert resolve_advantages(grpo) == PerRow(grpo)
    with pytest.raises(ValueError, match=r"out of grpo, .*, gae or a function, got 'grpoo'"):
        resolve_advantages("grpoo")
