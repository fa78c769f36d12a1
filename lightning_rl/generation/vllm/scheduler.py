"""Scheduling of requests: the next one to send, and its server."""

import asyncio
import heapq
import itertools
import threading
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from lightning_rl.generation.vllm.http import Unanswered
from lightning_rl.generation.vllm.server_client import Endpoint

URGENT = -1  # rank of requests that wait for no slot, because a sync waits for them


@dataclass(slots=True, eq=False)
class Server:
    """One server of a pool."""

    endpoint: Endpoint
    ready: bool = False  # has the current weights and accepts requests
    outstanding: int = 0  # tokens of its open and expected requests, with the maximum of responses
    in_flight: int = 0  # requests
    losses: int = 0  # since the last answer
    due: float = 0.0  # earliest time of a retry, by the monotonic clock
    error: Exception = field(default_factory=lambda: Unanswered("not contacted yet"))  # reason for not being ready
    loading: threading.Lock = field(default_factory=threading.Lock)  # held while weights are loaded
    waiting: "list[Ticket]" = field(default_factory=list)  # requests that wait for this server

    @property
    def why(self) -> str:
        """Reason for not being ready, now or last."""
        return str(self.error)


@dataclass(slots=True, eq=False)
class Seat:
    """Server of requests with the same prefix, which it computes once and then caches."""

    tokens: int = 0  # of requests that are not sent yet
    server: Server | None = None


@dataclass(slots=True, order=True)
class Ticket:
    """Request that waits for a slot."""

    rank: int  # lowest first
    number: int  # then in order of arrival
    tokens: int = field(compare=False)
    seat: Seat = field(compare=False)
    avoid: Container[Server] = field(compare=False)
    place: "asyncio.Future[Server]" = field(compare=False)


class Places:
    """Scheduler with a fixed number of slots at each server. Used only in the thread of the event loop.

    A request whose seat has a server waits for a slot there even if others are idle. Without one it goes to the server
    with the fewest outstanding tokens, including those of requests that will follow to the same seat.

    Args:
        servers: Initial servers.
        at_once: Number of slots at each server.
        rank: Rank of this process. Ties between servers are broken by rank, so that ranks with few requests do not all
            use the same server.
    """

    def __init__(self, servers: Sequence[Server], *, at_once: int, rank: int = 0) -> None:
        self.servers, self.at_once, self.rank = list(servers), at_once, rank
        self._waiting: list[Ticket] = []
        self._numbers = itertools.count()

    def follow(self, servers: Sequence[Server]) -> None:
        """Replace the servers. Requests that wait for a removed server wait for any."""
        for server in self.servers:
            if server not in servers:
                self._send_back(server)
        self.servers = list(servers)
        self.assign()

    async def take(self, tokens: int, seat: Seat, *, rank: int = 0, avoid: Container[Server] = ()) -> Server:
        """Return a server with a slot for a request; :meth:`release` frees it.

        Args:
            tokens: Tokens of the prompt and at most of the response; subtracted from those of the seat.
            seat: Seat of the request; its server is set.
            rank: Rank of the request; :data:`URGENT` skips the wait for a slot.
            avoid: Servers to use last.
        """
        place = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, Ticket(rank, next(self._numbers), tokens, seat, avoid, place))
        self.assign()
        try:
            return await place
        except BaseException:
            if place.cancelled() or place.exception() is not None:
                self._count(seat, tokens)
            else:  # assigned just before the cancellation
                self.release(place.result(), tokens)
            raise

    def release(self, server: Server, tokens: int) -> None:
        """Free a slot."""
        server.in_flight -= 1
        server.outstanding -= tokens
        self.assign()

    def fail(self, error: Exception) -> None:
        """Raise an error in every waiting request."""
        for ticket in (*self._waiting, *(ticket for server in self.servers for ticket in server.waiting)):
            if not ticket.place.done():
                ticket.place.set_exception(error)

    def assign(self) -> None:
        """Assign free slots to waiting requests."""
        first = self.rank % max(1, len(self.servers))
        ready = [server for server in (*self.servers[first:], *self.servers[:first]) if server.ready]
        for server in self.servers:
            if server not in ready:
                self._send_back(server)
        while (queue := self._next(ready)) is not None:
            ticket = heapq.heappop(queue)
            if ticket.place.done():
                continue
            server = ticket.seat.server
            if server not in ready or server in ticket.avoid:
                server = self._seat(ticket, ready)
            if self._has_place(server, ticket):
                self._count(ticket.seat, ticket.tokens)
                server.in_flight += 1
                server.outstanding += ticket.tokens
                ticket.place.set_result(server)
            else:
                heapq.heappush(server.waiting, ticket)

    def _has_place(self, server: Server, ticket: Ticket) -> bool:
        return server.in_flight < self.at_once or ticket.rank == URGENT

    def _send_back(self, server: Server) -> None:
        for ticket in server.waiting:
            heapq.heappush(self._waiting, ticket)
        server.waiting.clear()

    def _next(self, ready: Sequence[Server]) -> list[Ticket] | None:
        """Return the queue whose first request is next to get a slot; None if there is none."""
        queues = [server.waiting for server in ready if server.waiting and self._has_place(server, server.waiting[0])]
        if self._waiting and any(self._has_place(server, self._waiting[0]) for server in ready):
            queues.append(self._waiting)
        return min(queues, key=lambda queue: queue[0], default=None)

    def _seat(self, ticket: Ticket, ready: Sequence[Server]) -> Server:
        """Choose a server for a request and all others of its seat."""
        server = min(
            ready,
            key=lambda server: (server in ticket.avoid, not self._has_place(server, ticket), server.outstanding),
        )
        seat = ticket.seat
        if seat.server is not None:
            seat.server.outstanding -= seat.tokens
        server.outstanding += seat.tokens
        seat.server = server
        return server

    @staticmethod
    def _count(seat: Seat, tokens: int) -> None:
        counted = min(tokens, seat.tokens)
        seat.tokens -= counted
        if seat.server is not None:
            seat.server.outstanding -= counted
