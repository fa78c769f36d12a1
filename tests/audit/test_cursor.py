"""A likelihood ratio separates a stopped source from random draws."""

import math
import random
from collections import Counter

import pytest

from lightning_rl.audit.cursor import CursorWatch

BOUND = -math.log(1e-9)


def rows(number: int, copies: int = 1) -> Counter[tuple[int, ...]]:
    return Counter({(row,): copies for row in range(number)})


def test_a_rollout_that_comes_again_counts_row_by_row() -> None:
    """Each of four rows of sixteen is 0.9 * 16 times as likely; two sources are compared, with half the weight each."""
    watch = CursorWatch(rows(16), 16, 4)
    assert watch.draw({place: (place,) for place in range(4)}) == set() and watch.nats == 0
    assert watch.draw({4 + place: (place,) for place in range(4)}) == {4, 5, 6, 7}
    assert watch.nats == pytest.approx(4 * math.log(0.9 * 16) - math.log(2))
    watch.draw({8 + place: (place,) for place in range(4)})
    assert watch.nats > 20.5
    watch.draw({12 + place: (place,) for place in range(4)})
    assert watch.nats > BOUND


def test_few_rows_in_another_order_count_as_a_set() -> None:
    watch, draw = CursorWatch(rows(16), 16, 4), random.Random(0)
    for rollout in range(3):
        order = draw.sample(range(4), 4) if rollout else range(4)
        watch.draw({4 * rollout + place: (row,) for place, row in enumerate(order)})
    assert watch.nats >= 8 * math.log(0.9 * 4) - math.log(2) - 1e-9


def test_what_returns_with_the_next_pass_still_counts() -> None:
    """After a pass of four rows, the next one may contain each of sixteen rows again, but these are used up."""
    watch = CursorWatch(rows(16), 16, 4)
    for rollout in range(4):
        watch.draw({4 * rollout + place: (place,) for place in range(4)})
    before = watch.nats
    assert watch.draw({16 + place: (place,) for place in range(4)}) == set(), "the pass is new"
    assert watch.nats == pytest.approx(before + 4 * math.log(0.9 * 16))


@pytest.mark.parametrize("copies", [1, 2])
def test_shuffled_passes_draw_nothing_too_often(copies: int) -> None:
    watch, draw, place = CursorWatch(rows(12, copies), 12 * copies, 4), random.Random(1), 0
    for _ in range(20):
        order = draw.sample([row % 12 for row in range(12 * copies)], 12 * copies)
        for first in range(0, len(order), 4):
            part = order[first : first + 4]
            assert watch.draw({place + number: (row,) for number, row in enumerate(part)}) == set()
            place += 4
            assert watch.nats == 0


def test_a_pass_that_is_one_rollout_may_come_again_in_order() -> None:
    watch = CursorWatch(rows(4), 4, 4)
    for rollout in range(50):
        assert watch.draw({4 * rollout + place: (place,) for place in range(4)}) == set()
    assert watch.nats == 0


@pytest.mark.parametrize(("number", "period"), [(1, 1), (2, 4), (16, 4), (40, 8)])
def test_rows_that_are_drawn_by_lot_are_no_source_that_has_stopped(number: int, period: int) -> None:
    highest = 0.0
    for seed in range(20):
        watch, draw = CursorWatch(rows(number), number, period), random.Random(seed)
        for rollout in range(60):
            places = range(period * rollout, period * (rollout + 1))
            watch.draw({place: (draw.randrange(number),) for place in places})
            highest = max(highest, watch.nats)
    assert highest < 12, "a bound of 20.7 has a probability of 1e-9 at a look"
