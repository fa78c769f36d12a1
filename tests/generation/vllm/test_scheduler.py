"""Scheduling of requests: groups stay at one server, servers have limits, and cancelled requests free their slots."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.generation.vllm.scheduler import Places, Seat, Server
from lightning_rl.generation.vllm.server_client import ServerClient
from lightning_rl.utils.event_loop import REQUESTS


def some_servers(number: int) -> list[Server]:
    return [Server(ServerClient(f"http://127.0.0.1:{9 + place}", None, 5), ready=True) for place in range(number)]


def begin(*takes: Coroutine[Any, Any, Server]) -> "list[asyncio.Task[Server]]":
    """Start tasks and run each until it waits."""

    async def run() -> "list[asyncio.Task[Server]]":
        tasks = [asyncio.create_task(take) for take in takes]
        await asyncio.sleep(0)
        return tasks

    return REQUESTS.run(run())


def ends(*tasks: "asyncio.Task[Server]") -> list[Any]:
    """Return the results of tasks; those that wait are cancelled."""

    async def run() -> list[Any]:
        await asyncio.wait(tasks, timeout=0)
        for task in tasks:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    return REQUESTS.run(run())


def test_a_group_waits_for_its_server_and_the_next_group_goes_to_another() -> None:
    one, two = some_servers(2)
    places, groups = Places([one, two], at_once=2), [Seat(), Seat()]
    tasks = begin(*(places.take(10, group) for group in groups for _ in range(3)))
    assert [task.done() for task in tasks] == [True, True, False] * 2
    assert [task.result() for task in tasks if task.done()] == [one, one, two, two]
    REQUESTS.call_soon(lambda: places.release(one, 10))
    assert ends(tasks[2], tasks[5])[0] is one
    assert [one.outstanding, two.outstanding] == [20, 20]


def test_the_server_with_the_fewest_outstanding_tokens_comes_first() -> None:
    first, second = some_servers(2)
    places = Places([first, second], at_once=256)
    taken = [REQUESTS.run(places.take(tokens, Seat())) for tokens in (30, 10, 15, 1)]
    assert taken == [first, second, second, second]
    for server, tokens in zip(taken, (30, 10, 15, 1), strict=True):
        REQUESTS.call_soon(lambda server=server, tokens=tokens: places.release(server, tokens))
    assert ends(*begin(places.take(1, Seat()))) == [first] and second.outstanding == second.in_flight == 0


def test_a_group_whose_server_is_lost_moves_to_another() -> None:
    one, two = some_servers(2)
    places, group = Places([one, two], at_once=1), Seat()
    tasks = begin(*(places.take(10, group) for _ in range(3)))
    one.ready = False
    REQUESTS.call_soon(places.assign)
    REQUESTS.call_soon(lambda: places.release(one, 10))
    REQUESTS.call_soon(lambda: places.release(two, 10))
    assert ends(*tasks) == [one, two, two] and group.server is two
    assert (one.outstanding, two.outstanding, one.in_flight, two.in_flight) == (0, 10, 0, 1)


def test_requests_of_the_lowest_rank_come_first() -> None:
    (server,) = some_servers(1)
    places = Places([server], at_once=1)
    tasks = begin(*(places.take(1, Seat(), priority=priority) for priority in (0, 3, 2, 2)))
    REQUESTS.call_soon(lambda: places.release(server, 1))
    assert [isinstance(end, Server) for end in ends(*tasks)] == [True, False, True, False]


async def hold(places: Places, seat: Seat, answered: asyncio.Event) -> None:
    """Hold a slot until a request is answered."""
    server = await places.take(7, seat)
    try:
        await answered.wait()
    finally:
        places.release(server, 7)


@given(st.lists(st.tuples(st.sampled_from(["answer", "lose", "find", "cancel"]), st.integers(0, 17)), max_size=60))
def test_slots_are_never_exceeded_and_all_are_freed_after_losses(moves: list[tuple[str, int]]) -> None:
    known = some_servers(3)

    async def play() -> None:
        places, groups = Places(known, at_once=2), [Seat() for _ in range(6)]
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

    REQUESTS.run(play())
    assert [(server.in_flight, server.outstanding) for server in known] == [(0, 0)] * 3
