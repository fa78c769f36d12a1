"""pass@k against enumeration, the majority by hand, the interval against tables."""

import math
from itertools import combinations

import pytest

from lightning_rl.evaluation.estimators import interval, majority, pass_at_k


def enumeration(samples: int, solved: int, k: int) -> float:
    """The share of all k-subsets of the samples that hold a solved one."""
    marks = [place < solved for place in range(samples)]
    subsets = list(combinations(marks, k))
    return sum(map(any, subsets)) / len(subsets)


@pytest.mark.parametrize("samples", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_solved_sample(samples: int) -> None:
    for solved in range(samples + 1):
        for k in range(1, samples + 1):
            assert pass_at_k(samples, solved, k) == pytest.approx(enumeration(samples, solved, k), abs=1e-15)


@pytest.mark.parametrize(
    ("samples", "solved", "k", "value"),
    [
        (4, 1, 2, 1 / 2),
        (5, 2, 3, 9 / 10),
        (8, 0, 8, 0.0),
        (8, 1, 8, 1.0),
        (10, 3, 1, 3 / 10),
    ],
)
def test_pass_at_k_by_hand(samples: int, solved: int, k: int, value: float) -> None:
    assert pass_at_k(samples, solved, k) == pytest.approx(value, abs=1e-15)


def test_pass_at_k_is_stable_where_binomials_overflow() -> None:
    exact = 1 - math.comb(9_000, 100) / math.comb(10_000, 100)
    assert pass_at_k(10_000, 1_000, 100) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(("samples", "solved", "k"), [(4, 1, 0), (4, 1, 5), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_what_it_is_not_defined_for(samples: int, solved: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"expected 1 <= k <= samples .* got {k}, {samples} and {solved}"):
        pass_at_k(samples, solved, k)


@pytest.mark.parametrize(
    ("answers", "solved", "value"),
    [
        (["7", "7", "8"], [1, 1, 0], 1.0),
        (["7", "8", "8"], [1, 0, 0], 0.0),
        (["7", "8"], [1, 0], 1 / 2),
        (["7", "8", "9", "8", "7", "9", "1"], [1, 0, 0, 0, 1, 0, 0], 1 / 3),
        ([None, None, "7"], [0, 0, 1], 1.0),
        ([None, None], [1, 1], 0.0),
        ([7, 7, 7, 8], [1, 1, 0, 0], 2 / 3),
    ],
)
def test_majority_by_hand(answers: list[str | None], solved: list[int], value: float) -> None:
    marks = [bool(mark) for mark in solved]
    assert majority(answers, marks) == pytest.approx(value, abs=1e-15)
    assert majority(answers[::-1], marks[::-1]) == majority(answers, marks), "the order of the samples never matters"


@pytest.mark.parametrize(
    ("right", "number", "low", "high"),
    [  # Wilson's interval, worked by hand with z = 1.959964: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)
        (8, 10, 0.4901625, 0.9433178),
        (0, 10, 0.0, 0.2775328),
        (10, 10, 0.7224672, 1.0),
        (1, 1, 0.2065493, 1.0),
        (50, 100, 0.4038315, 0.5961685),
    ],
)
def test_interval_of_shares_is_wilsons(right: int, number: int, low: float, high: float) -> None:
    values = [1.0] * right + [0.0] * (number - right)
    assert interval(values) == pytest.approx((low, high), abs=1e-7)
    assert interval(values, 8) == pytest.approx((low, high), abs=1e-7), "several samples that agree are worth one"


def test_interval_of_means_counts_prompts_by_how_much_they_vary() -> None:
    values = [0.25, 0.75] * 8  # mean 1/2, variance 1/16 where 0 and 1 would have 1/4: worth 4 x 16 prompts
    assert interval(values, 8) == pytest.approx(interval([0.0, 1.0] * 32), abs=1e-12)
    assert interval(values, 2) == pytest.approx(interval([0.0, 1.0] * 16), abs=1e-12), "but never more than the samples"


def test_interval_has_a_width_where_all_prompts_are_alike() -> None:
    assert interval([0.5] * 10, 4) == pytest.approx(interval([0.0, 1.0] * 20), abs=1e-12)
