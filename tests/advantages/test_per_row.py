"""Group estimators: one number for each row, from the rewarded rows of its group."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from kit.support import fit, tiny_module
from torch import Tensor
from torch.testing import assert_close
from typing_extensions import override

from lightning_rl import GRPO, OPO, RLOO, DrGRPO, Estimator, MaxRL, Normalized, RawReward
from lightning_rl.advantages import (
    ESTIMATORS,
    Advantages,
    FunctionEstimator,
    Level,
    RewardSignal,
    RowEstimator,
    RowFunction,
    resolve_advantages,
)
from lightning_rl.signal.statistics import group_statistics

NAN, INF = math.nan, math.inf
HALF = math.sqrt(0.5)
each = pytest.mark.parametrize("estimator", [GRPO(), RLOO(), RawReward()])
centred = pytest.mark.parametrize("estimator", [GRPO(), RLOO()])


def advantages(
    estimator: RowEstimator, scores: list[float], groups: list[int] | None = None, rewarded: list[int] | None = None
) -> Tensor:
    everyone = [1] * len(scores) if rewarded is None else rewarded
    ids = torch.tensor([0] * len(scores) if groups is None else groups, dtype=torch.int64)
    return estimator.per_row(torch.tensor(scores), ids, torch.tensor(everyone, dtype=torch.bool))


def signal_of(scores: list[float], rewarded: list[int], valid: Tensor) -> RewardSignal:
    """Answers to one prompt."""
    nothing = torch.zeros(valid.shape, dtype=torch.float64)
    return RewardSignal(
        scores=torch.tensor(scores, dtype=torch.float64),
        rewarded=torch.tensor(rewarded, dtype=torch.bool),
        groups=torch.zeros(len(scores), dtype=torch.int64),
        valid_tokens=valid,
        token_rewards=nothing,
        shaped=nothing,
    )


@pytest.mark.parametrize(
    ("estimator", "scores", "groups", "rewarded", "expected"),
    [
        pytest.param(GRPO(), [1, 0], [0, 0], [1, 1], [HALF, -HALF], id="grpo-pair"),
        pytest.param(GRPO(), [1, 0, 3], [0, 0, 1], [1, 1, 1], [HALF, -HALF, 0], id="grpo-singleton"),
        pytest.param(
            GRPO(),
            [1, 0, 1, 0, 0, 0, 0],
            [0, 0, 0, 0, 1, 1, 1],
            [1] * 7,
            [0.866, -0.866, 0.866, -0.866, 0, 0, 0],
            id="grpo-groups-of-4-and-3",
        ),
        pytest.param(GRPO(), [1, 5, 0, 7], [3, 9, 3, 9], [1] * 4, [HALF, -HALF, -HALF, HALF], id="grpo-interleaved"),
        pytest.param(GRPO(), [1, 0, 1, -100], [0] * 4, [1, 1, 1, 0], [0.577, -1.155, 0.577, 0], id="grpo-row-left-out"),
        pytest.param(GRPO(), [1, 0, NAN], [0] * 3, [1, 1, 0], [HALF, -HALF, 0], id="grpo-nan-left-out"),
        pytest.param(GRPO(), [1, 0, INF], [0] * 3, [1, 1, 0], [HALF, -HALF, 0], id="grpo-infinity-left-out"),
        pytest.param(GRPO(), [1, 100], [0, 0], [1, 0], [0, 0], id="grpo-one-rewarded-row"),
        pytest.param(GRPO(), [1, 100], [0, 0], [0, 0], [0, 0], id="grpo-no-rewarded-row"),
        pytest.param(GRPO(), [1.0, 1.00001], [0, 0], [1, 1], [-0.6196, 0.6196], id="grpo-small-spread"),
        pytest.param(RLOO(), [1, 0, 2], [0] * 3, [1] * 3, [0, -1.5, 1.5], id="rloo"),
        pytest.param(RLOO(), [1, 0, 2, 9], [0] * 4, [1, 1, 1, 0], [0, -1.5, 1.5, 0], id="rloo-row-left-out"),
        pytest.param(RLOO(), [5, 1], [0, 0], [1, 0], [0, 0], id="rloo-one-rewarded-row"),
        pytest.param(RLOO(), [1, 0, 7], [0, 0, 1], [1] * 3, [1, -1, 0], id="rloo-singleton"),
        pytest.param(RawReward(), [1, 0, 2], [0, 0, 1], [1] * 3, [1, 0, 2], id="reinforce"),
        pytest.param(RawReward(), [1, NAN], [0, 0], [1, 0], [1, 0], id="reinforce-nan-left-out"),
        pytest.param(GRPO(), [], [], [], [], id="grpo-no-rows"),
        pytest.param(RLOO(), [], [], [], [], id="rloo-no-rows"),
    ],
)
def test_estimators_give_the_hand_worked_numbers(
    estimator: RowEstimator, scores: list[float], groups: list[int], rewarded: list[int], expected: list[float]
) -> None:
    found = advantages(estimator, [float(score) for score in scores], groups, rewarded)
    assert found.dtype == torch.float32
    assert_close(found, torch.tensor([float(value) for value in expected]), atol=6e-4, rtol=0)
    assert found.count_nonzero() == sum(value != 0 for value in expected)


@centred
def test_a_large_offset_costs_no_precision(estimator: RowEstimator) -> None:
    scores, offset = [0.0, 1.0, 4.0], 2.0**20
    assert_close(advantages(estimator, [score + offset for score in scores]), advantages(estimator, scores))


@each
@pytest.mark.parametrize("poison", [NAN, INF])
def test_a_broken_reward_of_a_rewarded_row_is_not_hidden_as_0(estimator: RowEstimator, poison: float) -> None:
    found = advantages(estimator, [1.0, poison, 0.0, 5.0, 7.0], [0, 0, 0, 1, 1])
    assert not found[1].isfinite()
    assert found[3:].isfinite().all()


def test_group_statistics_are_those_of_the_rewarded_rows() -> None:
    found = group_statistics(
        torch.tensor([1.0, 4.0, NAN, 7.0]), torch.tensor([0, 0, 0, 5]), torch.tensor([True, True, False, True])
    )
    assert found.number.tolist() == [2, 2, 2, 1]
    assert found.mean.tolist() == [2.5, 2.5, 2.5, 7.0]
    assert_close(found.std(), torch.tensor([4.5, 4.5, 4.5, 0.0], dtype=torch.float64).sqrt())
    assert found.spread.tolist() == [True, True, False, False]


def test_names_resolve_and_an_unknown_one_lists_them() -> None:
    assert all(resolve_advantages(name) is estimator for name, estimator in ESTIMATORS.items())
    assert resolve_advantages(centered) == FunctionEstimator(centered)
    with pytest.raises(
        ValueError, match=r"out of grpo, .*, optimal_token_baseline, an object or a function, got 'grpoo'"
    ):
        resolve_advantages("grpoo")
    with pytest.raises(ValueError, match="expected an object as advantages, got the class Normalized: call it"):
        resolve_advantages(Normalized)  # pyrefly: ignore[bad-argument-type]
    assert FunctionEstimator(partial(partial(by_group), scale=2.0)).name == "by_group"


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        pytest.param(lambda scores: scores[:, None], r"\[2, 1\]", id="column"),
        pytest.param(lambda scores: scores.sum(), r"\[\]", id="scalar"),
        pytest.param(lambda scores: scores.tolist(), "list", id="list"),
    ],
)
def test_a_function_that_returns_anything_but_a_number_for_each_row_is_named(
    wrong: Callable[[Tensor], Any], got: str
) -> None:
    def mine(scores: Tensor, _groups: Tensor, _rewarded: Tensor) -> Any:
        return wrong(scores)

    signal = signal_of([1.0, 0.0], [1, 1], torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=rf"advantages=mine to return one value per row \[2\], got {got}"):
        resolve_advantages(mine)(signal)


EVERYONE = torch.ones(5, dtype=torch.bool)
SCORES, PAIR_AND_THREE = torch.tensor([1.0, 3.0, 0.0, 6.0, 0.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1, 1])


@pytest.mark.parametrize(
    ("mean", "std", "leave_one_out", "expected"),
    [
        pytest.param("none", "none", False, [1, 3, 0, 6, 0], id="reward"),
        pytest.param("group", "none", False, [-1, 1, -2, 4, -2], id="dr-grpo"),
        pytest.param("group", "none", True, [-2, 2, -3, 6, -3], id="rloo"),
        pytest.param("batch", "none", False, [-1, 1, -2, 4, -2], id="batch-mean"),
        pytest.param("batch", "none", True, [-1.25, 1.25, -2.5, 5, -2.5], id="batch-mean-leave-one-out"),
        pytest.param("group", "group", False, [-HALF, HALF, -2 / 12**0.5, 4 / 12**0.5, -2 / 12**0.5], id="grpo"),
        pytest.param(
            "group",
            "batch",
            False,
            [-1 / 6.5**0.5, 1 / 6.5**0.5, -2 / 6.5**0.5, 4 / 6.5**0.5, -2 / 6.5**0.5],
            id="lite-ppo",
        ),
        pytest.param("none", "group", False, [1 / 2**0.5, 3 / 2**0.5, 0, 6 / 12**0.5, 0], id="scaled-by-the-group"),
        pytest.param(
            "batch",
            "group",
            True,
            [-1.25 / 2**0.5, 1.25 / 2**0.5, -2.5 / 12**0.5, 5 / 12**0.5, -2.5 / 12**0.5],
            id="leave-one-out-over-the-deviation",
        ),
    ],
)
def test_normalized_at_every_level(mean: Level, std: Level, expected: list[float], *, leave_one_out: bool) -> None:
    options: dict[str, Any] = {"mean": mean, "std": std, "leave_one_out": leave_one_out, "epsilon": 0.0}
    found = Normalized(**options).per_row(SCORES, PAIR_AND_THREE, EVERYONE)
    assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_the_biased_deviation_divides_by_n_and_epsilon_is_added() -> None:
    pair = torch.tensor([0.0, 2.0]), torch.tensor([0, 0]), torch.tensor([True, True])
    assert Normalized(unbiased=False, epsilon=0.0).per_row(*pair).tolist() == [-1.0, 1.0]
    assert Normalized(unbiased=False, epsilon=1.0).per_row(*pair).tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("level", ["group", "batch"])
def test_rows_outside_rewarded_enter_no_level(level: Level) -> None:
    scores, rewarded = torch.tensor([0.0, 2.0, NAN]), torch.tensor([True, True, False])
    found = Normalized(mean=level, std=level, epsilon=0.0).per_row(scores, torch.zeros(3, dtype=torch.long), rewarded)
    assert_close(found, torch.tensor([-HALF, HALF, 0.0]))


def test_a_constant_population_gives_0_at_its_own_level_alone() -> None:
    scores, groups = torch.tensor([2.0, 2.0, 1.0, 5.0]), torch.tensor([0, 0, 1, 1])
    whole = torch.ones(4, dtype=torch.bool)
    assert not Normalized(mean="none", std="group").per_row(scores, groups, whole)[:2].any()
    assert Normalized(mean="batch", std="batch").per_row(scores, groups, whole)[:2].all()
    assert not Normalized(mean="batch", std="none").per_row(torch.full((4,), 1.1), groups, whole).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": "row"}, r"expected mean and std out of batch, group, none, got 'row' and 'group'"),
        ({"std": "all"}, r"got 'group' and 'all'"),
        ({"mean": "none", "leave_one_out": True}, r'leave_one_out=False with mean="none"'),
        ({"epsilon": -1.0}, r"expected epsilon >= 0, got -1.0"),
        ({"epsilon": NAN}, r"expected epsilon >= 0, got nan"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Normalized(**options)


@pytest.mark.parametrize(
    ("scores", "groups", "rewarded", "expected"),
    [
        pytest.param([1, 0, 0, 1], [0] * 4, [1] * 4, [1, -1, -1, 1], id="half-right"),
        pytest.param([1, 0, 0, 0], [0] * 4, [1] * 4, [3, -1, -1, -1], id="a-rare-success-weighs-more"),
        pytest.param([1, -1, 0], [0] * 3, [1] * 3, [0, 0, 0], id="mean-of-0"),
        pytest.param([1, -2, -2], [0] * 3, [1] * 3, [0, 0, 0], id="mean-below-0"),
        pytest.param([1, 1], [0] * 2, [1] * 2, [0, 0], id="constant"),
        pytest.param([0, 0], [0] * 2, [1] * 2, [0, 0], id="no-success"),
        pytest.param([1, 0, NAN], [0] * 3, [1, 1, 0], [1, -1, 0], id="left-out"),
        pytest.param([1, 0, 3], [0, 0, 1], [1] * 3, [1, -1, 0], id="singleton"),
    ],
)
def test_maxrl_is_relative_to_the_mean(
    scores: list[float], groups: list[int], rewarded: list[int], expected: list[float]
) -> None:
    assert_close(
        advantages(MaxRL(), [float(score) for score in scores], groups, rewarded),
        torch.tensor([float(value) for value in expected]),
        atol=2e-5,  # an epsilon of 1e-6 beside a mean of .25 takes 1.2e-5 off an advantage of 3
        rtol=0,
    )


def test_maxrl_adds_epsilon_to_the_mean_and_bears_an_epsilon_of_0() -> None:
    batch = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool)
    assert MaxRL(epsilon=0.5).per_row(*batch).tolist() == [0.5, -0.5, 0.0, 0.0]
    assert MaxRL(epsilon=0.0).per_row(*batch).tolist() == [1.0, -1.0, 0.0, 0.0]


def test_dr_grpo_leaves_the_scale_alone() -> None:
    assert advantages(DrGRPO(), [100.0, 0.0, 50.0, 7.0], [0, 0, 0, 1]).tolist() == [50.0, -50.0, 0.0, 0.0]
    assert advantages(DrGRPO(), [1.0, 0.0, 9.0], [0, 0, 0], [1, 1, 0]).tolist() == [0.5, -0.5, 0.0]


@pytest.mark.parametrize(
    ("scores", "lengths", "rewarded", "expected"),
    [
        pytest.param([1, 0], [1, 3], [1, 1], [0.75, -0.25], id="a-long-row-weighs-more"),
        pytest.param([1, 0], [2, 2], [1, 1], [0.5, -0.5], id="equal-lengths-give-the-mean"),
        pytest.param([1, 0, 5], [1, 3, 9], [1, 1, 0], [0.75, -0.25, 0], id="left-out"),
        pytest.param([1, 0], [4, 0], [1, 1], [0, -1], id="a-row-without-tokens-has-no-weight"),
        pytest.param([1, 0], [0, 0], [1, 1], [1, 0], id="no-tokens-at-all"),
        pytest.param([3, 3], [1, 5], [1, 1], [0, 0], id="constant"),
    ],
)
def test_opo_subtracts_the_mean_weighed_with_lengths(
    scores: list[float], lengths: list[int], rewarded: list[int], expected: list[float]
) -> None:
    found = OPO()(signal_of(scores, rewarded, torch.arange(9) < torch.tensor(lengths)[:, None])).advantages
    spread = torch.where(torch.arange(9) < torch.tensor(lengths)[:, None], torch.tensor(expected)[:, None], 0.0)
    assert_close(found, spread.double())


def centered(scores: Tensor, _groups: Tensor, _rewarded: Tensor) -> Tensor:
    """A user's function for a single prompt."""
    return scores - scores.mean()


def by_group(scores: Tensor, groups: Tensor, rewarded: Tensor, *, scale: float = 1.0) -> Tensor:
    """A user's function that subtracts the mean of each group."""
    group = group_statistics(scores, groups, rewarded)
    return scale * (scores - group.mean.to(scores.dtype))


def over_deviation(scores: Tensor, groups: Tensor, _rewarded: Tensor) -> Tensor:
    """A user's function that knows no deviation of a single row: NaN for groups of one."""
    found = torch.empty_like(scores)
    for group in groups.unique():
        own = scores[groups == group]
        found[groups == group] = (own - own.mean()) / own.var().sqrt()
    return found


def in_fours(scores: Tensor, _groups: Tensor, _rewarded: Tensor) -> Tensor:
    """A user's function that knows its group size."""
    groups = scores.reshape(-1, 4)
    return (groups - groups.mean(-1, keepdim=True)).flatten()


class Leader(Estimator):
    """A user's estimator: the distance to the best of the group."""

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        same = signal.groups[:, None] == signal.groups
        return Advantages(signal.spread_out(signal.scores - torch.where(same, signal.scores, -INF).amax(-1)))


def test_whether_a_group_of_one_teaches_nothing_is_known_of_every_estimator() -> None:
    comparing = {name for name, estimator in ESTIMATORS.items() if estimator.compares}
    by_row = {"grpo", "dr_grpo", "rloo", "maxrl", "opo", "gpg", "pass_at_k"}
    assert comparing == {*by_row, "reinforce_plus_plus_baseline", "optimal_token_baseline"}
    assert GRPO(epsilon=0.1, unbiased=False).compares and not RawReward().compares
    assert Normalized(mean="batch").compares and not Normalized(mean="batch", std="none").compares


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom:UserWarning")
@pytest.mark.parametrize(
    ("estimator", "compares"),
    [
        (by_group, True),
        (partial(by_group, scale=2.0), True),
        (over_deviation, True),
        (Leader(), True),
        (centered, False),
        (lambda scores, *_: scores, False),
        (in_fours, False),
    ],
)
def test_so_it_is_of_a_users_function(estimator: Estimator | RowFunction, *, compares: bool) -> None:
    assert resolve_advantages(estimator).compares == compares


def test_a_users_function_that_compares_refuses_groups_of_one() -> None:
    with pytest.raises(ValueError, match="advantages=by_group compares the samples of a prompt, so group_size=1"):
        fit(tiny_module(advantages=by_group, group_size=1))
    assert fit(tiny_module(advantages=centered, group_size=1), max_steps=1).global_step == 1


def test_what_an_estimator_looks_at_is_declared() -> None:
    by_group_alone = {"grpo", "dr_grpo", "rloo", "opo", "pass_at_k", "hierarchical_grpo"}
    within = {name for name, estimator in ESTIMATORS.items() if estimator.within_groups}
    assert within == {*by_group_alone, "maxrl", "reinforce", "optimal_token_baseline"}
    shift_invariant = {name for name, estimator in ESTIMATORS.items() if estimator.shift_invariant}
    assert shift_invariant == {*by_group_alone, "gpg"}
    assert FunctionEstimator(by_group).within_groups and not FunctionEstimator(by_group).shift_invariant
    levels: list[Any] = [("group", "group"), ("group", "none"), ("none", "group"), ("batch", "none"), ("none", "none")]
    for mean, std in levels:
        estimator = Normalized(mean=mean, std=std)
        assert (estimator.within_groups, estimator.shift_invariant) == (mean != "batch", mean == "group")
    assert not Normalized(std="batch").within_groups and not Normalized(std="batch").shift_invariant
