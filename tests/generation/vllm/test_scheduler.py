"""Places: groups stay together and are spread, a limit for each server, and nobody who leaves keeps a place."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.generation.vllm.http import LOOP, Unanswered
from lightning_rl.generation.vllm.scheduler import URGENT, Places, Seat, Server
from lightning_rl.generation.vllm.server_client import Endpoint


def some_servers(number: int) -> list[Server]:
    return [Server(Endpoint(f"http://127.0.0.1:{9 + place}", None, 5), ready=True) for place in range(number)]


def begin(*takes: Coroutine[Any, Any, Server]) -> "list[asyncio.Task[Server]]":
    """Tasks that have come as far as they can."""

    async def run() -> "list[asyncio.Task[Server]]":
        tasks = [asyncio.create_task(take) for take in takes]
        await asyncio.sleep(0)
        return tasks

    return LOOP.run(run())


def ends(*tasks: "asyncio.Task[Server]") -> list[Any]:
    """What tasks end with; one that waits is cancelled."""

    async def run() -> list[Any]:
        await asyncio.wait(tasks, timeout=0)
        for task in tasks:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    return LOOP.run(run())


def test_a_group_fills_its_server_and_the_next_group_goes_elsewhere_before_the_first_is_all_sent() -> None:
    one, two = some_servers(2)
    places, groups = Places([one, two], at_once=2), [Seat(tokens=30), Seat(tokens=30)]
    tasks = begin(*(places.take(10, group) for group in groups for _ in range(3)))
    assert [task.done() for task in tasks] == [True, True, False] * 2
    assert [task.result() for task in tasks if task.done()] == [one, one, two, two]
    assert [one.outstanding, two.outstanding] == [30, 30], "with those that wait"
    LOOP.call_soon(lambda: places.release(one, 10))
    assert ends(tasks[2], tasks[5])[0] is one
    assert [group.tokens for group in groups] == [0, 0] and [one.outstanding, two.outstanding] == [20, 20]


def test_a_group_whose_server_is_lost_goes_on_together_elsewhere() -> None:
    one, two = some_servers(2)
    places, group = Places([one, two], at_once=1), Seat(tokens=30)
    tasks = begin(*(places.take(10, group) for _ in range(3)))
    one.ready = False
    LOOP.call_soon(places.assign)
    LOOP.call_soon(lambda: places.release(one, 10))
    LOOP.call_soon(lambda: places.release(two, 10))
    assert ends(*tasks) == [one, two, two] and group.server is two
    assert (one.outstanding, two.outstanding, one.in_flight, two.in_flight) == (0, 10, 0, 1)


def test_the_urgent_wait_for_no_place_and_those_of_the_lowest_rank_go_first() -> None:
    (server,) = some_servers(1)
    places = Places([server], at_once=1)
    tasks = begin(*(places.take(1, Seat(), rank=rank) for rank in (0, 3, 2, 2, URGENT)))
    assert [task.done() for task in tasks] == [True, False, False, False, True]
    LOOP.call_soon(lambda: (places.release(server, 1), places.release(server, 1)))
    assert [type(end) for end in ends(*tasks)] == [
        Server,
        asyncio.CancelledError,
        Server,
        asyncio.CancelledError,
        Server,
    ]


def test_who_waits_when_all_fail_hears_of_it() -> None:
    (server,) = some_servers(1)
    places, seat = Places([server], at_once=1), Seat(tokens=2)
    tasks = begin(*(places.take(1, seat) for _ in range(2)))
    LOOP.call_soon(lambda: places.fail(Unanswered("gone")))
    _, error = ends(*tasks)
    assert isinstance(error, Unanswered) and seat.tokens == 0 and server.outstanding == 1


async def hold(places: Places, seat: Seat, answered: asyncio.Event) -> None:
    """One request."""
    server = await places.take(7, seat)
    try:
        await answered.wait()
    finally:
        places.release(server, 7)


@given(st.lists(st.tuples(st.sampled_from(["answer", "lose", "find", "cancel"]), st.integers(0, 17)), max_size=60))
def test_nothing_is_left_outstanding_and_no_limit_is_passed_whatever_happens(moves: list[tuple[str, int]]) -> None:
    known = some_servers(3)

    async def play() -> None:
        places, groups = Places(known, at_once=2), [Seat(tokens=21) for _ in range(6)]
        answered = [asyncio.Event() for _ in range(18)]
        tasks = [asyncio.create_task(hold(places, groups[n // 3], event)) for n, event in enumerate(answered)]
        await asyncio.sleep(0)
        for move, number in moves:
            if move == "answer":
                answered[number].set()
            elif move == "cancel":
                tasks[number].cancel()
            else:
                known[number % 3].ready = move == "find"
                places.assign()
            await asyncio.sleep(0)
            assert max(server.in_flight for server in known) <= 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    LOOP.run(play())
    assert [(server.in_flight, server.outstanding) for server in known] == [(0, 0)] * 3
