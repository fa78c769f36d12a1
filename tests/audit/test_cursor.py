"""Repeated rollouts separate a stopped source from random draws."""

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from lightning_rl.audit.cursor import CursorWatch

BOUND = -math.log(1e-9)


def rows(number: int, copies: int = 1) -> Counter[tuple[int, ...]]:
    return Counter({(row,): copies for row in range(number)})


def test_a_rollout_that_comes_again_counts_row_by_row() -> None:
    """Each of four rows of sixteen has a chance of a sixteenth."""
    watch = CursorWatch(rows(16), 16, 4)
    assert watch.draw({place: (place,) for place in range(4)}) == set() and watch.nats == 0
    assert watch.draw({4 + place: (place,) for place in range(4)}) == {4, 5, 6, 7}
    assert watch.nats == pytest.approx(4 * math.log(16))
    watch.draw({8 + place: (place,) for place in range(4)})
    assert watch.nats > BOUND
    watch.draw({12 + place: (place + 1,) for place in range(4)})
    assert watch.nats == 0


@pytest.mark.parametrize("copies", [1, 2])
def test_shuffled_passes_draw_nothing_too_often(copies: int) -> None:
    watch, draw, place = CursorWatch(rows(12, copies), 12 * copies, 4), random.Random(1), 0
    for _ in range(20):
        order = draw.sample([row % 12 for row in range(12 * copies)], 12 * copies)
        for first in range(0, len(order), 4):
            part = order[first : first + 4]
            assert watch.draw({place + number: (row,) for number, row in enumerate(part)}) == set()
            assert watch.order_nats < BOUND
            place += 4


def test_one_row_may_come_again() -> None:
    watch = CursorWatch(rows(1), 1, 1)
    assert all(watch.draw({place: (0,)}) == set() for place in range(50)) and watch.nats == 0


@pytest.mark.parametrize("order", [range(16), [place * 5 % 16 for place in range(16)]], ids=["of_the_data", "fixed"])
def test_passes_in_one_order_are_unlikely_to_be_shuffled(order: Sequence[int]) -> None:
    watch = CursorWatch(rows(16), 16, 4)
    for first in range(0, 32, 4):
        watch.draw({place: (order[place % 16],) for place in range(first, first + 4)})
    assert watch.order_nats > BOUND
