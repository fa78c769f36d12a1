"""Scheduling of requests over servers: the next one to send, and its server."""

import asyncio
import itertools
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_rl.generation.vllm.server_client import ServerClient
from lightning_rl.utils.http import Unanswered


@dataclass(slots=True, eq=False)
class Server:
    """One server of a fleet."""

    client: ServerClient
    ready: bool = False  # has the current weights and accepts requests
    listed: bool = True  # False once it was removed from the list
    outstanding: int = 0  # tokens of its requests, with the maximum of responses
    in_flight: int = 0  # requests
    described: bool = False  # its description was compared with that of the others
    loaded: bool = False  # this run has loaded weights into it
    losses: int = 0  # since the last answer
    due: float = 0.0  # earliest time of a retry, by the monotonic clock
    error: Exception = field(default_factory=lambda: Unanswered("not contacted yet"))  # reason for not being ready
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while weights are loaded


@dataclass(slots=True, eq=False)
class Seat:
    """Server of requests with the same prefix, which it computes once and then caches."""

    server: Server | None = None


@dataclass(slots=True, order=True)
class WaitingRequest:
    """Request that waits for a slot."""

    priority: int  # lowest first
    number: int  # then in order of arrival
    tokens: int = field(compare=False)
    seat: Seat = field(compare=False)
    place: "asyncio.Future[Server]" = field(compare=False)


class Places:
    """Scheduler with a fixed number of slots at each server. Used only in the thread of the event loop.

    A request whose seat has a server waits for a slot there even if others are idle. Without one it goes to the server
    with the fewest outstanding tokens.

    Args:
        servers: Initial servers.
        at_once: Number of slots at each server.
        rank: Rank of this process. Ties between servers are broken by rank, so that ranks with few requests do not all
            use the same server.
    """

    def __init__(self, servers: Sequence[Server], *, at_once: int, rank: int = 0) -> None:
        self.servers, self.at_once, self.rank = list(servers), at_once, rank
        self._waiting: list[WaitingRequest] = []
        self._numbers = itertools.count()

    async def take(self, tokens: int, seat: Seat, *, priority: int = 0) -> Server:
        """Return a server with a slot for a request; :meth:`release` frees it.

        Args:
            tokens: Tokens of the prompt and at most of the response.
            seat: Seat of the request; its server is set.
            priority: Priority of the request, lowest first.
        """
        place: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
        insort(self._waiting, WaitingRequest(priority, next(self._numbers), tokens, seat, place))
        self.assign()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # assigned just before the cancellation
                self.release(place.result(), tokens)
            raise

    def release(self, server: Server, tokens: int) -> None:
        """Free a slot."""
        server.in_flight -= 1
        server.outstanding -= tokens
        self.assign()

    def fail(self, error: Exception) -> None:
        """Raise an error in every waiting request."""
        waiting, self._waiting = self._waiting, []
        for ticket in waiting:
            if not ticket.place.done():
                ticket.place.set_exception(error)

    def assign(self) -> None:
        """Assign free slots to waiting requests."""
        first = self.rank % max(1, len(self.servers))
        ready = [server for server in (*self.servers[first:], *self.servers[:first]) if server.ready]
        kept = list[WaitingRequest]()
        for position, ticket in enumerate(self._waiting):
            free = [server for server in ready if server.in_flight < self.at_once]
            if not free:
                kept += self._waiting[position:]
                break
            if ticket.place.done():
                continue
            seat = ticket.seat
            if seat.server not in ready:
                seat.server = min(free, key=lambda server: server.outstanding)
            if seat.server in free:
                seat.server.in_flight += 1
                seat.server.outstanding += ticket.tokens
                ticket.place.set_result(seat.server)
            else:
                kept.append(ticket)
        self._waiting = kept
