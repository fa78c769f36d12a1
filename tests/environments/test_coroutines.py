"""Coroutines: one loop for the process, which nobody who exits in it takes along."""

import asyncio

import pytest

from lightning_rl.environments.coroutines import Raised, gather, start


async def give(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def leave() -> int:
    raise SystemExit(3)


def test_results_come_in_their_order() -> None:
    assert gather([give(1), give(2)]) == [1, 2] and start(give(3)).result(5) == 3


def test_a_coroutine_that_exits_ends_neither_the_loop_nor_the_others() -> None:
    with pytest.raises(SystemExit, match="3"):
        start(leave()).result(5)
    one, other = gather([leave(), give(2)])
    assert isinstance(one, Raised) and isinstance(one.error, SystemExit) and other == 2
    assert start(give(4)).result(5) == 4
