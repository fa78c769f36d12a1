"""A crew: who goes first, what is cancelled, what is raised."""

import threading

import pytest

from lightning_rl.generation.vllm.crew import Crew
from lightning_rl.generation.vllm.http import Cancelled

WAIT = 60.0  # seconds after which a test that would hang fails


def test_the_lowest_rank_goes_first_and_of_equal_ones_the_first_that_came() -> None:
    crew, gate, made = Crew(1), threading.Event(), list[str]()
    crew.submit(0, lambda: gate.wait(WAIT))
    futures = [
        crew.submit(rank, lambda name=name: made.append(name)) for name, rank in zip("abcd", (2, 1, 2, 1), strict=True)
    ]
    futures[2].cancel()
    gate.set()
    crew.close()
    assert made == ["b", "d", "a"]


def test_what_a_call_raises_is_raised_where_it_is_read_and_stops_nobody_else() -> None:
    crew = Crew(1)
    wrong, right = crew.submit(0, lambda: 1 / 0), crew.submit(1, lambda: 7)
    assert right.result(WAIT) == 7
    with pytest.raises(ZeroDivisionError):
        wrong.result(WAIT)
    crew.close()
    with pytest.raises(Cancelled):
        crew.submit(0, list)
