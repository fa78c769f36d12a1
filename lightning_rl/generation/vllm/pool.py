"""A pool of servers: which one is asked next, how a lost one comes back, and one sound answer for each request."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightning_rl.generation.engine import EngineError, Request
from lightning_rl.generation.vllm.crew import Crew
from lightning_rl.generation.vllm.endpoint import Endpoint, Sample
from lightning_rl.generation.vllm.http import Calls, Cancelled, Refused, Unanswered
from lightning_rl.generation.vllm.push import WeightPush
from lightning_rl.generation.weights.stream import Shape

LOG = logging.getLogger(__name__)
ATTEMPTS = 6  # of one request, each at a server that was healthy a moment before
POLL = 1.0  # seconds between two health checks
BACKOFF, MAX_BACKOFF = 0.25, 10.0  # seconds before a server that was lost is asked again; doubles with each loss
MAX_DOUBLINGS = 16  # more would only overflow
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class Server:
    """One server of a pool."""

    endpoint: Endpoint
    ready: bool = False  # has the current weights and may be asked
    outstanding: int = 0  # tokens, of prompts and at most of responses, that it has been asked for
    losses: int = 0  # since its last answer
    due: float = 0.0  # when it may come back, by the monotonic clock
    error: Exception = field(default_factory=lambda: Unanswered("it was not asked yet"))  # that it is not ready for
    loading: threading.Lock = field(default_factory=threading.Lock)  # held by whoever brings it to other weights

    @property
    def why(self) -> str:
        """The reason that it is not ready, or was not."""
        return str(self.error)


@dataclass(slots=True)
class Seat:
    """Where a conversation was answered last, and its prefix is cached."""

    server: Server | None = None


class ServerPool:
    """Sends each request to the server with the fewest outstanding tokens, and to another one if that is lost.

    Args:
        endpoints: of the servers.
        push: brings a server to the current weights.
        patience: seconds without any server until requests fail.
        rank: of this process.
        at_once: requests that a server is sent at the same time; further ones wait, those of the oldest rollout first.

    Attributes:
        oldest: number of the oldest push that answers may come from; that of the last one that every server has.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint], push: WeightPush, *, patience: float, rank: int = 0, at_once: int = 256
    ) -> None:
        first = rank % max(1, len(endpoints))  # or with few requests all ranks would ask the same servers
        self.servers = [Server(endpoint) for endpoint in (*endpoints[first:], *endpoints[:first])]
        self.push, self.patience, self.rank, self.at_once = push, patience, rank, at_once
        self.oldest = 0
        self._crew = Crew(at_once * len(self.servers))
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._watchers = [
            threading.Thread(target=self._watch, args=(server,), name=f"watch-{server.endpoint.url}", daemon=True)
            for server in self.servers
        ]

    def watch(self) -> None:
        """Begins to look after lost servers, each in a thread of its own, so that none waits for another."""
        for watcher in self._watchers:
            watcher.start()

    def close(self) -> None:
        """Ends the watch and every call; whoever waits is cut short."""
        self._closed.set()
        for server in self.servers:
            server.endpoint.close()
        self._notify()
        for watcher in self._watchers:
            if watcher.is_alive():
                watcher.join()
        self._crew.close()

    def ready(self) -> list[Server]:
        """Those that may be asked."""
        with self._changed:
            return [server for server in self.servers if server.ready]

    def wait(self, calls: Calls | None = None, *, strict: bool = False) -> None:
        """Returns once a server is ready.

        Args:
            calls: that may be cut short meanwhile.
            strict: whether a server that is there, and not what the run needs, ends the wait.

        Raises:
            EngineError: if none is within the patience.
            ValueError: what is wrong with a server, if that ends the wait.
            Cancelled: if the calls were cut short.
        """
        end = time.monotonic() + self.patience
        with self._changed:
            while not any(server.ready for server in self.servers):
                self._check_open(calls)
                for server in self.servers if strict else ():
                    if isinstance(server.error, ValueError):
                        raise server.error
                left = end - time.monotonic()
                if left <= 0:
                    reasons = "; ".join(f"{server.endpoint.url}: {server.why}" for server in self.servers)
                    raise EngineError(
                        f"expected one of {len(self.servers)} servers to be ready within {self.patience:g} s, got none "
                        f"({reasons}): start one by lightning-rl serve, and go on from the last checkpoint"
                    )
                self._changed.wait(left)
            self._check_open(calls)

    @contextmanager
    def acquire(
        self, tokens: int, calls: Calls, *, avoid: Container[Server] = (), prefer: Server | None = None
    ) -> Iterator[Server]:
        """The server that is preferred, or the one with the fewest outstanding tokens, for so many more.

        Servers to avoid come last. Waits and raises as :meth:`wait` does.
        """
        with self._changed:
            self.wait(calls)
            ready = [server for server in self.servers if server.ready]
            server = min(ready, key=lambda server: (server in avoid, server is not prefer, server.outstanding))
            server.outstanding += tokens
        try:
            yield server
        finally:
            with self._changed:
                server.outstanding -= tokens

    def map(self, function: Callable[[Item, Calls], Result], items: Sequence[Item]) -> list[Result]:
        """What a function of (item, calls) makes of every item, in their order, many at a time.

        After the first failure all others are cut short: the servers notice, and end what they were doing.
        """
        crew = Crew(max(1, min(len(items), self.at_once * len(self.servers))))
        try:
            return self._map(crew, function, [(0, item) for item in items])
        finally:
            crew.close()

    def draw(self, function: Callable[[Request, Calls], Result], requests: Sequence[Request]) -> list[Result]:
        """The same for requests, as many at a time as the servers take; those of an earlier rollout go first."""
        return self._map(self._crew, function, [(request.rollout, request) for request in requests])

    def _map(
        self, crew: Crew, function: Callable[[Item, Calls], Result], items: Sequence[tuple[int, Item]]
    ) -> list[Result]:
        with self._batch(crew, function) as submit:
            futures = [submit(rank, item) for rank, item in items]
            for future in as_completed(futures):
                future.result()
        return [future.result() for future in futures]

    def each(self, function: Callable[[Request, Calls], None], take: Callable[[], Sequence[Request]]) -> None:
        """Runs a function of (request, calls) for every request that comes up, until none is taken.

        After a failure of ``take`` all others are cut short, as in :meth:`map`.
        """
        with self._batch(self._crew, function) as submit:
            while requests := take():
                for request in requests:
                    submit(request.rollout, request)

    @contextmanager
    def _batch(
        self, crew: Crew, function: Callable[[Item, Calls], Result]
    ) -> Iterator[Callable[[int, Item], "Future[Result]"]]:
        """What submits calls that belong together: after a failure they are cut short; at the end all have ended."""
        calls, futures = Calls(), list[Future[Result]]()

        def submit(rank: int, item: Item) -> "Future[Result]":
            futures.append(crew.submit(rank, lambda: function(item, calls)))
            return futures[-1]

        try:
            yield submit
        except BaseException:
            for future in futures:
                future.cancel()
            calls.cancel()
            self._notify()
            raise
        finally:
            wait(futures)

    def ask(
        self,
        ids: Sequence[int],
        parameters: Mapping[str, Any],
        calls: Calls,
        *,
        name: str,
        oldest: int,
        seat: Seat | None = None,
    ) -> Sample:
        """One sound answer, by the server of a seat, or by whichever gives it, who has the seat from then on.

        ``parameters`` are vLLM's; ``oldest`` is the number of the oldest push that tokens may come from, pinned before
        the first request of a batch was sent.

        Raises:
            EngineError: if there was no server, none with a sound answer, or each one refused the request.
        """
        why, refusing, seat = "", list[Server](), seat or Seat()
        tokens = len(ids) + parameters["max_tokens"]
        for _ in range(ATTEMPTS):
            with self.acquire(tokens, calls, avoid=refusing, prefer=seat.server) as server:
                if server in refusing:
                    raise EngineError(f"expected a server to take request {name}, but each one refused it: {why}")
                try:
                    sample = self._ask(server, ids, parameters, calls, name=name, oldest=oldest)
                except Refused as refusal:
                    refusing.append(server)
                    why = str(refusal)
                    continue
                if sample is not None:
                    self.reset_losses(server)
                    seat.server = server
                    return sample
                why = server.why
        raise EngineError(f"expected an answer to request {name} in {ATTEMPTS} attempts, got none: {why}")

    def ask_all(self, ids: Sequence[int], parameters: Mapping[str, Any], *, name: str) -> dict[str, Sample]:
        """The answer of every server that is there, by its URL; who has none is lost.

        Raises:
            EngineError: if nobody answered.
        """

        def ask(server: Server, calls: Calls) -> Sample | None:
            try:
                return self._ask(server, ids, parameters, calls, name=name, oldest=self.oldest)
            except Refused as refusal:
                raise EngineError(f"expected every server to take request {name}, got a refusal: {refusal}") from None

        for _ in range(ATTEMPTS):
            self.wait()
            servers = self.ready()
            answers = zip(servers, self.map(ask, servers), strict=True)
            if samples := {server.endpoint.url: sample for server, sample in answers if sample is not None}:
                return samples
        raise EngineError(f"expected a server to answer request {name} in {ATTEMPTS} attempts, got none")

    def _ask(
        self,
        server: Server,
        ids: Sequence[int],
        parameters: Mapping[str, Any],
        calls: Calls,
        *,
        name: str,
        oldest: int,
    ) -> Sample | None:
        """One answer, whole and from weights that are new enough; None from a server that has none and so is lost.

        Raises:
            Refused: if it is this request that the server refuses; whoever refuses all of them is lost.
        """
        run, url = self.push.run, server.endpoint.url
        name = f"{run}-{name}-{self.rank}-{next(self._numbers)}"  # no server may see it twice
        try:
            sample = server.endpoint.sample(name, ids, parameters, calls)
            if sample.finish_reason == "abort" or not sample.token_ids:
                raise Unanswered(f"expected a whole response from {url}, got one that somebody aborted")
            if max(sample.token_ids) >= self.push.description.vocabulary:
                raise Unanswered(f"expected ids of the vocabulary from {url}, got {max(sample.token_ids)}")
            for label in set(sample.labels):
                if label.number < oldest or not self.push.knows(label):
                    raise Unanswered(f"expected weights of push {run}/{oldest} at {url}, got {label}")
        except (Unanswered, Refused) as error:
            if isinstance(error, Refused) and error.of_request:
                raise
            self.remove(server, error)
            return None
        return sample

    def update(self) -> None:
        """Brings every server that is there to the current weights.

        Raises:
            EngineError: if none has them within the patience; whoever refuses us may think better of it.
            RuntimeError: if none has them, and one said why.
        """
        errors = self.refresh()
        for error in errors if not self.ready() else ():
            if not isinstance(error, Unanswered | Refused):
                raise error
        self.wait()

    def compare(self, sent: Sequence[tuple[str, Shape]]) -> None:
        """Compares the names and shapes that syncs will bring with those of every server, now or when it comes back.

        Raises:
            EngineError: if no server is left.
            ValueError: if one holds others.
        """
        self.push.sent = list(sent)
        for server in self.ready():
            try:
                server.endpoint.compare(sent)
            except (Unanswered, Refused) as error:
                self.remove(server, error)
        self.wait()

    def refresh(self) -> list[Exception]:
        """Brings every server that is there to the current weights, all at once; those that fail are lost.

        Returns:
            What went wrong.
        """
        now = time.monotonic()
        servers = [server for server in self.servers if server.ready or server.due <= now]
        with ThreadPoolExecutor(max(1, len(servers))) as threads:
            return [error for error in threads.map(self._refresh, servers) if error is not None]

    def _refresh(self, server: Server) -> Exception | None:
        with server.loading:
            try:
                self.push.update(server.endpoint)
            except Cancelled:
                raise
            except (Unanswered, ValueError, RuntimeError) as error:
                self.remove(server, error)
                return error
            self.restore(server)
            return None

    def remove(self, server: Server, why: Exception) -> None:
        """Takes a server out until it answers again, after a pause that doubles with each loss."""
        with self._changed:
            if server.ready or server.why != str(why):
                message = "lost %s: %s; it is asked again until it is back, others get its requests meanwhile"
                LOG.warning(message, server.endpoint.url, why)
            server.ready, server.error = False, why
            server.due = time.monotonic() + min(BACKOFF * 2 ** min(server.losses, MAX_DOUBLINGS), MAX_BACKOFF)
            server.losses += 1
            self._changed.notify_all()

    def restore(self, server: Server) -> None:
        """Lets a server be asked, because it has the current weights."""
        with self._changed:
            if server.losses and not server.ready:
                LOG.warning("%s is back, with the current weights", server.endpoint.url)
            server.ready = True
            self._changed.notify_all()

    def reset_losses(self, server: Server) -> None:
        """After an answer; one to a request from before the server was lost does not count."""
        with self._changed:
            if server.ready:
                server.losses = 0

    def _watch(self, server: Server) -> None:
        while not self._closed.wait(POLL if server.ready else max(0.0, server.due - time.monotonic())):
            try:
                server.endpoint.check_health()
                if not server.ready:
                    self._refresh(server)
            except Cancelled:
                return
            except Exception as error:  # noqa: BLE001  without its watch a server would stay lost for ever
                if server.ready:
                    server.endpoint.abort()
                self.remove(server, error)

    def _check_open(self, calls: Calls | None) -> None:
        if self._closed.is_set() or (calls is not None and calls.cancelled.is_set()):
            raise Cancelled("the request was cut short")

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
