"""Pool of servers: routing of requests, retries, and recovery of lost servers."""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from lightning_rl.generation.engine import EngineError
from lightning_rl.generation.vllm.scheduler import Places, Seat, Server
from lightning_rl.generation.vllm.server_client import Sample, ServerClient
from lightning_rl.generation.vllm.weight_push import Proof, WeightPush
from lightning_rl.generation.weights.weight_stream import Shape
from lightning_rl.utils.event_loop import REQUESTS
from lightning_rl.utils.http import Cancelled, Refused, Unanswered

LOG = logging.getLogger(__name__)
ATTEMPTS = 6  # per request
POLL = 1.0  # seconds between two health checks
BACKOFF, MAX_BACKOFF = 0.25, 10.0  # seconds until a lost server is tried again; doubles with each loss
MAX_DOUBLINGS = 16  # avoids overflow
Item = TypeVar("Item")
Result = TypeVar("Result")


class ServerPool:
    """Sends each request to a server with a free slot, and to another one if that server is lost.

    Args:
        clients: Clients of the servers.
        push: Push that brings a server to the current weights.
        patience: Seconds without a ready server after which requests fail.
        rank: Rank of this process.
        at_once: Maximum number of concurrent requests at each server; others wait, lowest rollout first.
        source: Name of the list of servers; empty for fixed servers.

    Attributes:
        oldest: Number of the oldest push that answers may come from, which is the last one that every server loaded.
    """

    def __init__(
        self,
        clients: Sequence[ServerClient],
        push: WeightPush,
        *,
        patience: float,
        rank: int = 0,
        at_once: int = 256,
        source: str = "",
    ) -> None:
        self.push, self.patience, self.rank, self.at_once, self.source = push, patience, rank, at_once, source
        self.oldest = 0
        self._places = Places([Server(client) for client in clients], at_once=at_once, rank=rank)
        self._expiry: asyncio.TimerHandle | None = None  # of the patience of waiting requests
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._open = list(self.servers)  # listed servers, and removed ones with requests in flight
        self._watchers = list[threading.Thread]()
        self._waits = False  # True once a wait for a server has been logged

    @property
    def servers(self) -> Sequence[Server]:
        """All listed servers, including lost ones."""
        return self._places.servers

    def watch(self, servers: Sequence[Server]) -> None:
        """Start a thread for each server that checks its health and recovers it."""
        for server in servers:
            name = f"watch-{server.client.url}"
            self._watchers.append(threading.Thread(target=self._watch, args=(server,), name=name, daemon=True))
            self._watchers[-1].start()

    def follow(self, urls: Sequence[str], connect: Callable[[str], ServerClient]) -> None:
        """Replace the servers by those of these URLs. Called by one thread.

        A new server gets requests once it has the current weights and the same log-probabilities of the canary's
        tokens as another server. A removed one gets no more requests, and is closed when its requests in flight have
        ended.
        """
        known = {server.client.url: server for server in self.servers}
        servers = [known.get(url) or Server(connect(url)) for url in urls]
        gone = [server for server in self.servers if server not in servers]
        new = [server for server in servers if server.client.url not in known]
        for server in gone:
            server.listed = False
            self.push.forget(server.client.url)
        with self._changed:
            self._places.servers = servers
            self._open += new
        self.watch(new)
        LOG.warning("servers by %s: added %s, removed %s", self.source, _names(new), _names(gone))
        self._notify()

    def _let_go(self, server: Server) -> None:
        """Close a removed server."""
        with server.loading:
            if self.push.writes:
                with suppress(Unanswered, Refused, Cancelled):
                    server.client.leave()
            LOG.warning("%s is closed: it was removed from the list, and its requests have ended", server.client.url)
            server.client.close()
            self._open.remove(server)

    def close(self) -> None:
        """Stop all threads and cancel every call."""
        self._closed.set()
        for server in list(self._open):
            server.client.close()
        self._notify()
        for watcher in self._watchers:
            watcher.join()

    def ready(self) -> list[Server]:
        """Return the servers that accept requests."""
        with self._changed:
            return [server for server in self.servers if server.ready]

    def wait(self, *, strict: bool = False) -> None:
        """Wait until a server is ready.

        Args:
            strict: True to raise for an unsuitable server; if the list may change, only if all are unsuitable.

        Raises:
            EngineError: If none is ready within the patience.
            ValueError: If a server is unsuitable, see ``strict``.
            Cancelled: If the pool was closed.
        """
        end = time.monotonic() + self.patience
        with self._changed:
            while not any(server.ready for server in self.servers):
                self._check_open()
                wrong = [server.error for server in self.servers if isinstance(server.error, ValueError)]
                if strict and wrong and (not self.source or len(wrong) == len(self.servers)):
                    raise wrong[0]
                self._log_wait()
                if time.monotonic() >= end:
                    raise self._none_ready()
                self._changed.wait(end - time.monotonic())
            self._check_open()

    def _log_wait(self) -> None:
        """Log the wait, once until a server is ready."""
        if not self._waits:
            self._waits = True
            LOG.warning("waiting up to %g s for one of %s (%s)", self.patience, *self._missing())

    def _missing(self) -> tuple[str, str]:
        """Return a description of the servers, and the reasons for which they are not ready."""
        reasons = "; ".join(f"{server.client.url}: {server.error}" for server in self.servers)
        return f"{len(self.servers)} servers" + (f" that {self.source} lists" if self.source else ""), reasons

    def _none_ready(self) -> EngineError:
        servers, reasons = self._missing()
        return EngineError(
            f"expected one of {servers} to be ready within {self.patience:g} s, got none ({reasons}): start one with "
            "lightning-rl serve, and resume from the last checkpoint"
        )

    def run(self, function: Callable[[Item], Coroutine[Any, Any, Result]], items: Sequence[Item]) -> list[Result]:
        """Run a coroutine function for every item concurrently and return the results; a failure cancels the others."""
        return REQUESTS.run(_all([function(item) for item in items]))

    async def ask(
        self,
        ids: Sequence[int],
        parameters: Mapping[str, Any],
        *,
        name: str,
        oldest: int,
        seat: Seat | None = None,
        priority: int = 0,
        pictures: Mapping[str, Any] | None = None,
    ) -> Sample:
        """Return a valid response from the server of a seat, or from any other.

        Args:
            ids: Token ids of the prompt.
            parameters: Sampling parameters of vLLM.
            name: Name of the request.
            oldest: Number of the oldest push that tokens may come from, read before the first request of a batch.
            seat: Seat shared with requests of the same prefix.
            priority: Place in the queue, lowest first.
            pictures: Entries of the request for pictures; None without.

        Raises:
            EngineError: If no server is ready, none returns a valid response, or one rejects the request.
        """
        seat, why, tokens = seat or Seat(), "", len(ids) + parameters["max_tokens"]
        for _ in range(ATTEMPTS):
            self._check_open()
            self._limit_patience()
            server = await self._places.take(tokens, seat, priority=priority)
            try:
                sample = await self._ask(server, ids, parameters, name=name, oldest=oldest, pictures=pictures)
            finally:
                self._places.release(server, tokens)
            if sample is not None:
                server.losses = 0 if server.ready else server.losses
                return sample
            why = str(server.error)
        raise EngineError(f"expected an answer to request {name} in {ATTEMPTS} attempts, got none: {why}")

    def ask_all(self, ids: Sequence[int], parameters: Mapping[str, Any], *, name: str) -> dict[str, Sample]:
        """Return the response of every ready server by URL.

        Raises:
            EngineError: If no server answered.
        """

        async def ask(server: Server) -> Sample | None:
            return await self._ask(server, ids, parameters, name=name, oldest=self.oldest)

        for _ in range(ATTEMPTS):
            self.wait()
            servers = self.ready()
            answers = zip(servers, self.run(ask, servers), strict=True)
            if samples := {server.client.url: sample for server, sample in answers if sample is not None}:
                return samples
        raise EngineError(f"expected a server to answer request {name} in {ATTEMPTS} attempts, got none")

    async def _ask(
        self,
        server: Server,
        ids: Sequence[int],
        parameters: Mapping[str, Any],
        *,
        name: str,
        oldest: int,
        pictures: Mapping[str, Any] | None = None,
    ) -> Sample | None:
        """Return a complete response from recent enough weights, or None after removing a server without one.

        Raises:
            EngineError: If the server rejects this request. A server that rejects the client is removed.
        """
        run, url = self.push.run, server.client.url
        try:
            numbered = f"{run}-{name}-{self.rank}-{next(self._numbers)}"
            sample = await server.client.draw(numbered, ids, parameters, pictures)
            if sample.finish_reason == "abort" or not sample.token_ids:
                raise Unanswered(f"expected a complete response from {url}, got an aborted one")
            for label in set(sample.labels):
                if label.number < oldest or not self.push.knows(label):
                    raise Unanswered(f"expected weights of push {run}/{oldest} at {url}, got {label}")
        except (Unanswered, Refused) as error:
            if isinstance(error, Refused) and error.of_request:
                raise EngineError(f"expected a server to accept request {name}, but it rejected it: {error}") from error
            self.remove(server, error)
            return None
        except Cancelled:  # the pool or the server was closed
            self._check_open()
            return None
        return sample

    def accept(self, proof: Proof, scored: Collection[str]) -> None:
        """Use the canary's result as the reference for all other servers.

        Args:
            proof: Log-probabilities under the current weights.
            scored: URLs of the servers that the canary checked; others are checked now.
        """
        with self._changed:
            self.push.proof = proof
            late = [server for server in self.servers if server.ready and server.client.url not in scored]
            for server in late:
                server.ready = False
        for server in late:
            self._refresh(server)

    def update(self) -> None:
        """Bring every reachable server to the current weights.

        Raises:
            EngineError: If none has them within the patience; a refusal is retried.
            RuntimeError: If none has them because a load failed.
        """
        errors = self.refresh()
        for error in errors if not self.ready() else ():
            if not isinstance(error, Unanswered | Refused):
                raise error
        self.wait()

    def compare(self, sent: Sequence[tuple[str, Shape]]) -> None:
        """Compare the names and shapes of synced tensors with those of every server, now or when it returns.

        Raises:
            EngineError: If no server is left.
            ValueError: If a fixed server has others.
        """
        self.push.sent = list(sent)
        for server in self.ready():
            try:
                server.client.compare(sent)
            except (Unanswered, Refused) as error:
                self.remove(server, error)
            except ValueError as error:
                if not self.source:
                    raise
                self.remove(server, error)
            except Cancelled:
                self._check_open()
        self.wait()

    def refresh(self) -> list[Exception]:
        """Bring every reachable server to the current weights in parallel; those that fail are lost.

        Returns:
            The errors.
        """
        now = time.monotonic()
        servers = [server for server in self.servers if server.ready or server.due <= now]
        with ThreadPoolExecutor(max(1, len(servers))) as threads:
            return [error for error in threads.map(self._refresh, servers) if error is not None]

    def _refresh(self, server: Server) -> Exception | None:
        with server.loading:
            restored = False
            while not restored:
                proof = self.push.proof
                try:
                    self.push.update(server.client)
                except Cancelled:
                    self._check_open()
                    return None
                except (Unanswered, ValueError, RuntimeError) as error:
                    self.remove(server, error)
                    return error
                restored = self.restore(server, proof)
            return None

    def remove(self, server: Server, why: Exception) -> None:
        """Take a server out until it answers again, with a delay that doubles with each loss."""
        with self._changed:
            if server in self.servers and (server.ready or str(server.error) != str(why)):
                message = "lost %s: %s; its requests go to other servers until it is back"
                LOG.warning(message, server.client.url, why)
            server.ready, server.error = False, why
            server.due = time.monotonic() + min(BACKOFF * 2 ** min(server.losses, MAX_DOUBLINGS), MAX_BACKOFF)
            server.losses += 1
        self._notify()

    def restore(self, server: Server, proof: Proof | None = None) -> bool:
        """Mark a server as ready, if the proof it was checked against is still current.

        Returns:
            False if the server has to be checked again.
        """
        with self._changed:
            if self.push.proof is not proof:
                return False
            if server.losses and not server.ready:
                LOG.warning("%s is back, with the current weights", server.client.url)
            server.ready, self._waits = True, False
        self._notify()
        return True

    def _watch(self, server: Server) -> None:
        while not self._closed.wait(self._pause(server)):
            if not server.listed and not server.in_flight:
                self._let_go(server)
                return
            try:
                server.client.check_health()
                if server.listed and not server.ready:
                    self._join(server)
            except Cancelled:
                return
            except Exception as error:  # noqa: BLE001  the thread has to survive, or the server stays lost
                if server.ready:
                    server.client.abort()
                self.remove(server, error)

    def _pause(self, server: Server) -> float:
        return POLL if server.ready or not server.listed else max(0.0, server.due - time.monotonic())

    def _join(self, server: Server) -> None:
        """Bring a server to the current weights, unless the canary has not checked them at a ready server yet."""
        if self.push.lacks_proof() and self.ready():
            server.due = time.monotonic() + BACKOFF
        else:
            self._refresh(server)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise Cancelled("the request was cancelled")

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
        REQUESTS.call_soon(self._assign)

    def _assign(self) -> None:
        if self._closed.is_set():
            self._places.fail(Cancelled("the request was cancelled"))
        self._limit_patience()
        self._places.assign()

    def _limit_patience(self) -> None:
        """Start the timer that fails waiting requests while no server is ready, or stop it."""
        if self._expiry is not None and (self.ready() or self._closed.is_set()):
            self._expiry.cancel()
            self._expiry = None
        elif self._expiry is None and not self.ready() and not self._closed.is_set():
            self._log_wait()
            self._expiry = asyncio.get_running_loop().call_later(self.patience, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        self._places.fail(self._none_ready())


def _names(servers: Sequence[Server]) -> str:
    return ", ".join(server.client.url for server in servers) or "none"


async def _all(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return results in order; after the first failure the other tasks are cancelled and awaited."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
