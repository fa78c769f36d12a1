"""Scheduling of requests: groups stay at one server, servers have limits, and cancelled requests free their slots."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from generation.vllm.served_engines import a_fleet
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.generation.vllm.fleet import Fleet, Seat
from lightning_rl.generation.vllm.server_client import Server
from lightning_rl.utils.event_loop import REQUESTS


def of_ready(number: int, at_once: int) -> Fleet:
    """Return a fleet of servers that are ready."""
    fleet = a_fleet(*(f"http://127.0.0.1:{9 + place}" for place in range(number)), at_once=at_once)
    for server in fleet.servers:
        server.ready = True
    return fleet


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
    fleet, groups = of_ready(2, at_once=2), [Seat(), Seat()]
    one, two = fleet.servers
    tasks = begin(*(fleet.take(10, group) for group in groups for _ in range(3)))
    assert [task.done() for task in tasks] == [True, True, False] * 2
    assert [task.result() for task in tasks if task.done()] == [one, one, two, two]
    REQUESTS.call_soon(lambda: fleet.release(one, 10))
    assert ends(tasks[2], tasks[5])[0] is one
    assert [one.outstanding, two.outstanding] == [20, 20]


def test_the_server_with_the_fewest_outstanding_tokens_comes_first() -> None:
    fleet = of_ready(2, at_once=256)
    first, second = fleet.servers
    taken = [REQUESTS.run(fleet.take(tokens, Seat())) for tokens in (30, 10, 15, 1)]
    assert taken == [first, second, second, second]
    for server, tokens in zip(taken, (30, 10, 15, 1), strict=True):
        REQUESTS.call_soon(lambda server=server, tokens=tokens: fleet.release(server, tokens))
    assert ends(*begin(fleet.take(1, Seat()))) == [first] and second.outstanding == second.in_flight == 0


def test_a_group_whose_server_is_lost_moves_to_another() -> None:
    fleet, group = of_ready(2, at_once=1), Seat()
    one, two = fleet.servers
    tasks = begin(*(fleet.take(10, group) for _ in range(3)))
    one.ready = False
    REQUESTS.call_soon(fleet.assign)
    REQUESTS.call_soon(lambda: fleet.release(one, 10))
    REQUESTS.call_soon(lambda: fleet.release(two, 10))
    assert ends(*tasks) == [one, two, two] and group.server is two
    assert (one.outstanding, two.outstanding, one.in_flight, two.in_flight) == (0, 10, 0, 1)


def test_requests_of_the_lowest_rank_come_first() -> None:
    fleet = of_ready(1, at_once=1)
    (server,) = fleet.servers
    tasks = begin(*(fleet.take(1, Seat(), priority=priority) for priority in (0, 3, 2, 2)))
    REQUESTS.call_soon(lambda: fleet.release(server, 1))
    assert [isinstance(end, Server) for end in ends(*tasks)] == [True, False, True, False]


async def hold(fleet: Fleet, seat: Seat, answered: asyncio.Event) -> None:
    """Hold a slot until a request is answered."""
    server = await fleet.take(7, seat)
    try:
        await answered.wait()
    finally:
        fleet.release(server, 7)


@given(st.lists(st.tuples(st.sampled_from(["answer", "lose", "find", "cancel"]), st.integers(0, 17)), max_size=60))
def test_slots_are_never_exceeded_and_all_are_freed_after_losses(moves: list[tuple[str, int]]) -> None:
    fleet = of_ready(3, at_once=2)
    known = fleet.servers

    async def play() -> None:
        groups = [Seat() for _ in range(6)]
        answered = [asyncio.Event() for _ in range(18)]
        tasks = [asyncio.create_task(hold(fleet, groups[n // 3], event)) for n, event in enumerate(answered)]
        await asyncio.sleep(0)
        for move, number in moves:
            if move == "answer":
                answered[number].set()
            elif move == "cancel":
                tasks[number].cancel()
            else:
                known[number % 3].ready = move == "find"
                fleet.assign()
            await asyncio.sleep(0)
            assert max(server.in_flight for server in known) <= 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    REQUESTS.run(play())
    assert [(server.in_flight, server.outstanding) for server in known] == [(0, 0)] * 3
