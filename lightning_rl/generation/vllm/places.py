"""Places: which of the requests that wait is sent next, and to which server."""

import asyncio
import heapq
import itertools
import threading
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from lightning_rl.generation.vllm.endpoint import Endpoint
from lightning_rl.generation.vllm.http import Unanswered

URGENT = -1  # the rank of requests that wait for no place: those that a sync waits for


@dataclass(slots=True, eq=False)
class Server:
    """One server of a pool."""

    endpoint: Endpoint
    ready: bool = False  # has the current weights and may be asked
    outstanding: int = 0  # tokens, of prompts and at most of responses, that it has been or will be asked for
    in_flight: int = 0  # requests
    losses: int = 0  # since its last answer
    due: float = 0.0  # when it may come back, by the monotonic clock
    error: Exception = field(default_factory=lambda: Unanswered("it was not asked yet"))  # that it is not ready for
    loading: threading.Lock = field(default_factory=threading.Lock)  # held by whoever brings it to other weights
    waiting: "list[Ticket]" = field(default_factory=list)  # for a place at this server and no other

    @property
    def why(self) -> str:
        """The reason that it is not ready, or was not."""
        return str(self.error)


@dataclass(slots=True, eq=False)
class Seat:
    """Where requests that begin alike are sent: their prefix is computed once, and then in the server's cache."""

    tokens: int = 0  # of requests that are still to be sent
    server: Server | None = None


@dataclass(slots=True, order=True)
class Ticket:
    """A request that waits for a place."""

    rank: int  # the lowest goes first
    number: int  # and of equal ones that which came first
    tokens: int = field(compare=False)
    seat: Seat = field(compare=False)
    avoid: Container[Server] = field(compare=False)
    place: "asyncio.Future[Server]" = field(compare=False)


class Places:
    """So many requests at a time at each server. Used in the thread of the event loop alone.

    A request whose seat has a server waits for a place there, however idle others are; without one it goes to the
    server with the fewest outstanding tokens, those of requests included that will follow it to the same seat.

    Args:
        servers: to begin with.
        at_once: requests at each server.
        rank: of this process. Of servers that are as good as each other it begins with another one than the other
            ranks, or with few requests all would ask the same.
    """

    def __init__(self, servers: Sequence[Server], *, at_once: int, rank: int = 0) -> None:
        self.servers, self.at_once, self.rank = list(servers), at_once, rank
        self._waiting: list[Ticket] = []
        self._numbers = itertools.count()

    def follow(self, servers: Sequence[Server]) -> None:
        """Has these servers and no others; who waits for one that is not among them waits for any."""
        for server in self.servers:
            if server not in servers:
                self._send_back(server)
        self.servers = list(servers)
        self.assign()

    async def take(self, tokens: int, seat: Seat, *, rank: int = 0, avoid: Container[Server] = ()) -> Server:
        """A server, with a place for a request of so many tokens; :meth:`release` gives it back.

        Args:
            tokens: of the prompt, and at most of the response; those of its seat are fewer by them from now on.
            seat: where it belongs; has the server afterwards.
            rank: of the request; :data:`URGENT` for one that does not wait while there is a server.
            avoid: servers that come last.
        """
        place = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, Ticket(rank, next(self._numbers), tokens, seat, avoid, place))
        self.assign()
        try:
            return await place
        except BaseException:
            if place.cancelled() or place.exception() is not None:
                self._count(seat, tokens)
            else:  # it was given in the moment in which nobody wanted it any more
                self.release(place.result(), tokens)
            raise

    def release(self, server: Server, tokens: int) -> None:
        """Gives a place back."""
        server.in_flight -= 1
        server.outstanding -= tokens
        self.assign()

    def fail(self, error: Exception) -> None:
        """Has everybody raise who waits."""
        for ticket in (*self._waiting, *(ticket for server in self.servers for ticket in server.waiting)):
            if not ticket.place.done():
                ticket.place.set_exception(error)

    def assign(self) -> None:
        """Gives away every place that somebody waits for."""
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
        """Has those who wait for a server wait for any."""
        for ticket in server.waiting:
            heapq.heappush(self._waiting, ticket)
        server.waiting.clear()

    def _next(self, ready: Sequence[Server]) -> list[Ticket] | None:
        """The queue with the first of those who can have a place; None if nobody can."""
        queues = [server.waiting for server in ready if server.waiting and self._has_place(server, server.waiting[0])]
        if self._waiting and any(self._has_place(server, self._waiting[0]) for server in ready):
            queues.append(self._waiting)
        return min(queues, key=lambda queue: queue[0], default=None)

    def _seat(self, ticket: Ticket, ready: Sequence[Server]) -> Server:
        """Chooses a server for a ticket and all who share its seat."""
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
        """Takes the tokens of a request off those that are still to come to a seat."""
        counted = min(tokens, seat.tokens)
        seat.tokens -= counted
        if seat.server is not None:
            seat.server.outstanding -= counted
