"""Fleet: servers of a run and the weights that they hold, with routing of requests and recovery of lost servers."""

import asyncio
import itertools
import logging
import shutil
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.generation.engine import EngineError
from lightning_rl.generation.vllm.broadcast import Broadcast
from lightning_rl.generation.vllm.discovery import ServerList, Urls
from lightning_rl.generation.vllm.group import Specification
from lightning_rl.generation.vllm.server_client import Label, Sample, Server, ServerClient
from lightning_rl.generation.vllm.storage import WeightFolder
from lightning_rl.generation.vllm.vllm_sampling import SCORING, check_pictures
from lightning_rl.generation.vllm.vllm_weights import VLLMWeights
from lightning_rl.generation.vllm.worker_extension import WorkerDescription
from lightning_rl.generation.weights import weight_stream
from lightning_rl.generation.weights.canary import Canary, CanaryError, Rounding
from lightning_rl.generation.weights.weight_folder import write_weights
from lightning_rl.policy.processor import processor_of
from lightning_rl.utils.atomic_write import write_atomically
from lightning_rl.utils.event_loop import REQUESTS, run_all
from lightning_rl.utils.http import Cancelled, Refused, Unanswered, quote

LOG = logging.getLogger(__name__)
ATTEMPTS = 6  # per request
POLL = 1.0  # seconds between two health checks
BACKOFF, MAX_BACKOFF = 0.25, 10.0  # seconds until a lost server is tried again; doubles with each loss
MAX_DOUBLINGS = 16  # avoids overflow
ENDING = 5.0  # seconds in which a load that was interrupted resumes the requests of its server
DECODED = 500  # token ids that are decoded to compare two tokenizers


class Goal(NamedTuple):
    """State that every server has to reach before it gets requests."""

    label: Label | None = None  # of the current weights
    ids: tuple[int, ...] = ()  # row
    logprobs: Tensor | None = None  # of the row, by a server that the canary checked; None before


class ServerRequest(NamedTuple):
    """Request for tokens, or for the log-probabilities of a prompt."""

    name: str
    ids: Sequence[int]  # token ids of the prompt
    parameters: Mapping[str, Any]  # sampling parameters of vLLM
    oldest: int  # number of the oldest push that tokens may come from, read before the first request of a batch
    priority: int = 0  # place in the queue, lowest first
    pictures: Mapping[str, Any] | None = None  # entries of the request for pictures


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


class Fleet:
    """Servers of a run and the weights that they hold. A server gets requests while it has the current weights.

    The state lives in the event loop of requests: coroutines run there, and other threads only read it.

    Args:
        urls: URLs of the servers at the start.
        listing: List of servers, which may change them.
        connect: Function that returns the client of a URL.
        folder: Folder of the weights, named by the run.
        outgoing: Function from the stream of the run's weights to that for vLLM.
        model: Model of the trainer, which every server has to serve.
        tokenizer: Tokenizer of the trainer.
        canary: Canary that compares a server with the others; None to skip it.
        patience: Seconds without a ready server after which requests fail.
        rank: Rank of this process; rank 0 sends the weights and makes servers load them, and the others wait.
        at_once: Maximum number of concurrent requests at each server; others wait, lowest rollout first.

    Attributes:
        servers: All listed servers, including lost ones.
        run: Random name of the run, equal on every rank.
        has_tokenizer: True if every server has the trainer's tokenizer and can find stop strings.
        oldest: Number of the oldest push that answers may come from, which is the last one that every server loaded.
    """

    def __init__(
        self,
        urls: Urls,
        listing: ServerList,
        connect: Callable[[str], ServerClient],
        folder: WeightFolder,
        outgoing: VLLMWeights,
        *,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        canary: Canary | None,
        patience: float,
        rank: int = 0,
        at_once: int = 256,
    ) -> None:
        self.run, self.patience, self.rank, self.source = folder.run, patience, rank, listing.source
        self.oldest = 0
        self.has_tokenizer = tokenizer is not None
        self._changes = listing.changes(urls)
        self._connect, self._folder, self._outgoing, self._canary = connect, folder, outgoing, canary
        self._policy = {
            "architecture": (model.config.architectures or [type(model).__name__])[0],
            "vocabulary": model.config.get_text_config().vocab_size,
        }
        self._ids = list(range(min(self._policy["vocabulary"], 0 if tokenizer is None else len(tokenizer), DECODED)))
        self._text = None if tokenizer is None else tokenizer.decode(self._ids)
        self._reads_pictures = processor_of(tokenizer) is not None
        self._description: WorkerDescription | None = None
        self._sent: list[tuple[str, weight_stream.Shape]] = []  # names and shapes of the synced tensors, once known
        self._broadcast: Broadcast | None = None
        self._base = None if outgoing.adapter is None else Label(self.run, 0, 0)  # to which adapters belong
        self._goal = Goal()
        self._versions: dict[int, int] = {}  # by number of the push
        self.servers = [Server(connect(url)) for url in urls]
        self._at_once, self._waiting = at_once, list[WaitingRequest]()
        self._expiry: asyncio.TimerHandle | None = None  # of the patience of waiting requests
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._closed = False
        self._open = list(self.servers)  # listed servers, and removed ones with requests in flight
        self._tasks = list[asyncio.Task[None]]()
        self._waits = False  # True once a wait for a server has been logged

    def ready(self) -> list[Server]:
        """Return the servers that accept requests."""
        return [server for server in self.servers if server.ready]

    @property
    def description(self) -> WorkerDescription:
        """Description common to all servers."""
        if self._description is None:
            raise RuntimeError("expected the description of a server, got none")
        return self._description

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the servers' weights."""
        return getattr(torch, self.description.dtype)

    # Weights, called by the thread that reads their stream.

    def start(self) -> None:
        """Create the folder of the weights, check every server, and wait until one is ready.

        From then on servers are followed as the list changes, checked every second, and recovered once they are lost.

        Raises:
            EngineError: If none is ready within the patience.
            ValueError: If a server is unsuitable; if the list may change, only if all are.
        """
        if self.rank == 0:
            self._folder.open()
        REQUESTS.run(self._start())

    def expect(self, weights: weight_stream.Weights, transfer: str) -> None:
        """Compare names and shapes with those of every server, now or when it returns.

        Raises:
            EngineError: If no server is left.
            ValueError: If a fixed server has others.
        """
        tensors, device = list[Specification](), torch.device("cpu")
        for name, weight in self._outgoing(weights):
            dtype = self.dtype if weight.is_floating_point() and name not in self._outgoing.exact else weight.dtype
            tensors.append((name, tuple(weight.shape), str(dtype).removeprefix("torch.")))
            device = weight.device
        REQUESTS.run(self._compare([(name, shape) for name, shape, _ in tensors]))
        if transfer == "broadcast" and self.rank == 0:
            self._broadcast = Broadcast(self.run, tensors, device, self.description.device)

    def publish(self, weights: weight_stream.Weights, version: int) -> None:
        """Send weights, or the adapter alone, from rank 0; on every rank bring all reachable servers to them.

        Raises:
            EngineError: If none has them within the patience; a refusal is retried.
            RuntimeError: If none has them because a load failed.
            ValueError: If the tensors are not those of the first sync.
        """
        before = self._goal.label or self._base
        label = Label(self.run, 0 if before is None else before.number + 1, version)
        if self.rank == 0:
            self._send(weight_stream.verify(self._outgoing(weights), dict(self._sent)), label)
        REQUESTS.run(self._advance(label))

    def _send(self, weights: weight_stream.Weights, label: Label) -> None:
        """Broadcast or write weights, all of them or the adapter.

        During a broadcast a returning server finds no weights, as two copies would take twice the memory.
        """
        adapter, whole = self._outgoing.adapter, self._base or label
        if adapter is not None and self._goal.label is not None:
            deque(weights, maxlen=0)
        elif self._broadcast is not None:
            self._folder.keep(())
            self._folder.keep(self._broadcast.send(self.ready(), weights, whole), whole.number)
        else:
            copies = weight_stream.copies(weights, self.dtype, torch.device("cpu"), self._outgoing.exact)
            write_weights(copies, self._folder.of(whole.number))
        if adapter is not None:
            write_atomically(self._folder.of(label.number), partial(adapter.save, dtype=self.dtype))

    def settle(self, oldest: int) -> None:
        """Delete earlier weights, once every server has loaded the current ones.

        Args:
            oldest: First version whose adapters are kept, for requests in flight. The base is kept too.
        """
        for folder in self._folder.path.iterdir() if self.rank == 0 else ():
            number = int(folder.name) if folder.name.isdecimal() else self.oldest
            needed = self._base is not None and (number == 0 or self._versions[number] >= oldest)
            if number < self.oldest and not needed:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """End all tasks, cancel every call, and delete the written weights."""
        if self._broadcast is not None:
            self._broadcast.close()
        REQUESTS.run(self._close())
        self._folder.close()

    # Servers, in the event loop.

    async def _start(self) -> None:
        for error in await self._refresh_all():
            if isinstance(error, ValueError) and not self.source:
                raise error
        self._watch_all(self.servers)
        self._tasks.append(asyncio.create_task(self._follow()))
        await self.wait(strict=True)

    async def _follow(self) -> None:
        async for urls in self._changes:
            self.follow(urls)

    def _watch_all(self, servers: Sequence[Server]) -> None:
        self._tasks += [asyncio.create_task(self._watch(server)) for server in servers]

    def follow(self, urls: Sequence[str]) -> None:
        """Replace the servers by those of these URLs.

        A new server gets requests once it has the current weights and the same log-probabilities of the canary's
        tokens as another server. A removed one gets no more requests, and is closed when its requests in flight have
        ended.
        """
        known = {server.client.url: server for server in self.servers}
        servers = [known.get(url) or Server(self._connect(url)) for url in urls]
        gone = [server for server in self.servers if server not in servers]
        new = [server for server in servers if server.client.url not in known]
        for server in gone:
            server.listed = False
        self.servers = servers
        self._open += new
        self._watch_all(new)
        LOG.warning("servers by %s: added %s, removed %s", self.source, _names(new), _names(gone))
        self._notify()

    async def _close(self) -> None:
        self._closed = True
        self._notify()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(self._leave(server) for server in self._open))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _leave(self, server: Server) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDING), server.loading:  # a load that was interrupted resumes the server
                pass
        await server.client.aclose()

    async def wait(self, *, strict: bool = False) -> None:
        """Wait until a server is ready.

        Args:
            strict: True to raise for an unsuitable server; if the list may change, only if all are unsuitable.

        Raises:
            EngineError: If none is ready within the patience.
            ValueError: If a server is unsuitable, see ``strict``.
            Cancelled: If the fleet was closed.
        """
        end = _now() + self.patience
        while not self.ready():
            self._check_open()
            wrong = [server.error for server in self.servers if isinstance(server.error, ValueError)]
            if strict and wrong and (not self.source or len(wrong) == len(self.servers)):
                raise wrong[0]
            self._log_wait()
            if _now() >= end:
                raise self._none_ready()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), end - _now())
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

    async def complete(self, request: ServerRequest, seat: Seat | None = None) -> Sample:
        """Return a valid response from the server of a seat, or from any other.

        Args:
            request: Request.
            seat: Seat shared with requests of the same prefix.

        Raises:
            EngineError: If no server is ready, none returns a valid response, or one rejects the request.
        """
        seat, why, tokens = seat or Seat(), "", len(request.ids) + request.parameters["max_tokens"]
        for _ in range(ATTEMPTS):
            server = await self.take(tokens, seat, priority=request.priority)
            try:
                sample = await self._ask(server, request)
            finally:
                self.release(server, tokens)
            if sample is not None:
                server.losses = 0 if server.ready else server.losses
                return sample
            why = str(server.error)
        raise EngineError(f"expected an answer to request {request.name} in {ATTEMPTS} attempts, got none: {why}")

    async def take(self, tokens: int, seat: Seat, *, priority: int = 0) -> Server:
        """Return a server with a slot for a request; :meth:`release` frees it.

        A request whose seat has a server waits for a slot there even if others are idle. Without one it goes to the
        server with the fewest outstanding tokens. Ties are broken by rank, so that ranks with few requests do not all
        use the same server.

        Args:
            tokens: Tokens of the prompt and at most of the response.
            seat: Seat of the request; its server is set.
            priority: Priority of the request, lowest first.
        """
        self._check_open()
        self._limit_patience()
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

    def _fail(self, error: Exception) -> None:
        """Raise an error in every waiting request."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.place.done():
                each.place.set_exception(error)

    def assign(self) -> None:
        """Assign free slots to waiting requests."""
        first = self.rank % max(1, len(self.servers))
        ready = [server for server in (*self.servers[first:], *self.servers[:first]) if server.ready]
        kept = list[WaitingRequest]()
        for position, each in enumerate(self._waiting):
            free = [server for server in ready if server.in_flight < self._at_once]
            if not free:
                kept += self._waiting[position:]
                break
            if each.place.done():
                continue
            seat = each.seat
            if seat.server not in ready:
                seat.server = min(free, key=lambda server: server.outstanding)
            if seat.server in free:
                seat.server.in_flight += 1
                seat.server.outstanding += each.tokens
                each.place.set_result(seat.server)
            else:
                kept.append(each)
        self._waiting = kept

    async def _ask(self, server: Server, request: ServerRequest) -> Sample | None:
        """Return a complete response from recent enough weights, or None after removing a server without one.

        Raises:
            EngineError: If the server rejects this request. A server that rejects the client is removed.
        """
        name, url, oldest = request.name, server.client.url, request.oldest
        try:
            numbered = f"{self.run}-{name}-{self.rank}-{next(self._numbers)}"
            sample = await server.client.draw(numbered, request.ids, request.parameters, request.pictures)
            if sample.finish_reason == "abort" or not sample.token_ids:
                raise Unanswered(f"expected a complete response from {url}, got an aborted one")
            for label in set(sample.labels):
                if label.number < oldest or not self._knows(label):
                    raise Unanswered(f"expected weights of push {self.run}/{oldest} at {url}, got {label}")
        except (Unanswered, Refused) as error:
            if isinstance(error, Refused) and error.of_request:
                raise EngineError(f"expected a server to accept request {name}, but it rejected it: {error}") from error
            self.remove(server, error)
            return None
        except Cancelled:  # the fleet or the server was closed
            self._check_open()
            return None
        return sample

    async def score_copies(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """Return the log-probabilities of a row by every ready server, by URL.

        The first of them become the reference for all other servers: those that the canary did not check are checked
        now.

        Raises:
            EngineError: If no server answered.
        """
        for _ in range(ATTEMPTS):
            await self.wait()
            servers = self.ready()
            request = ServerRequest("canary", ids, SCORING, self.oldest)
            answers = zip(servers, await run_all(self._ask(server, request) for server in servers), strict=True)
            scores = {server.client.url: sample.prompt_logprobs for server, sample in answers if sample is not None}
            if scores:
                break
        else:
            raise EngineError(f"expected a server to answer request canary in {ATTEMPTS} attempts, got none")
        self._goal = Goal(self._goal.label, tuple(ids), next(iter(scores.values())))
        late = [server for server in self.ready() if server.client.url not in scores]
        for server in late:
            server.ready = False
        await run_all([self._refresh(server) for server in late])
        return scores

    def _knows(self, label: Label) -> bool:
        """Return True if these weights were pushed, or may be in a push by rank 0, ahead of this rank."""
        current = self._goal.label
        ahead = current is not None and label.number == current.number + 1
        return label.run == self.run and (label.version == self._versions.get(label.number) or ahead)

    async def _advance(self, label: Label) -> None:
        """Bring every reachable server to new weights, see :meth:`publish`."""
        self._versions[label.number] = label.version
        self._goal = Goal(label)
        errors = await self._refresh_all()
        for error in errors if not self.ready() else ():
            if not isinstance(error, Unanswered | Refused):
                raise error
        await self.wait()
        self.oldest = label.number

    async def _compare(self, sent: Sequence[tuple[str, weight_stream.Shape]]) -> None:
        self._sent = list(sent)
        for server in self.ready():
            try:
                await server.client.compare(sent)
            except Cancelled:
                self._check_open()
            except (Unanswered, ValueError) as error:
                if not self.source and not isinstance(error, Unanswered | Refused):
                    raise
                self.remove(server, error)
        await self.wait()

    async def _refresh_all(self) -> list[Exception]:
        """Bring every reachable server to the current weights in parallel; return the errors of those that are lost."""
        now = _now()
        servers = [server for server in self.servers if server.ready or server.due <= now]
        errors = await run_all([self._refresh(server) for server in servers])
        return [error for error in errors if error is not None]

    async def _refresh(self, server: Server) -> Exception | None:
        """Bring a server to the current weights; return the error of a lost one."""
        async with server.loading:
            try:
                goal = None
                while goal is not self._goal:  # it may change meanwhile
                    goal = self._goal
                    await self._bring(server, goal)
            except Cancelled:
                self._check_open()
                return None
            except (Unanswered, ValueError, RuntimeError) as error:
                self.remove(server, error)
                return error
            if server.losses and not server.ready:
                LOG.warning("%s is back, with the current weights", server.client.url)
            server.ready, self._waits = True, False
            self._notify()
            return None

    async def _bring(self, server: Server, goal: Goal) -> None:
        """Bring a server to the goal, unless it has reached it.

        Raises:
            Unanswered: If it cannot be reached, or rank 0 has not pushed the weights yet.
            ValueError: If it does not suit the run.
            RuntimeError: If it could not load the weights, or differs from the trainer afterwards.
        """
        client, label, current = server.client, await server.client.label(), goal.label
        if label is None or label.run != self.run or not server.described:
            await self._check(server, label)
        if current is None:
            return
        if label != current:
            if self.rank != 0:
                waits = "waits for rank 0 to push the weights of version"
                raise Unanswered(f"{client.url} {waits} {current.version}")
            if self._base is None or label is None or label.run != self.run:
                whole = self._base or current
                folder = await asyncio.to_thread(self._folder.find, whole.number)
                if folder is None:
                    raise Unanswered(f"expected weights of version {whole.version} to load, but newer ones are coming")
                await client.load(folder, whole)
            if self._base is not None:
                await client.load_adapter(self._folder.of(current.number), current)
            server.loaded = True
        client.adapter = None if self._base is None else current
        if goal.logprobs is not None and self._canary is not None:
            sample = await client.draw(f"proof-{current}-{token_hex(4)}", goal.ids, SCORING)
            gap = (sample.prompt_logprobs - goal.logprobs).double().abs()
            if not self._canary.within(gap, Rounding.of({self.dtype}, tf32=self.description.device != "cpu")):
                await client.clear_label()
                raise CanaryError(
                    f"expected {client.url} to agree with another server on version {current.version}, but its "
                    f"log-probabilities differ by up to {float(gap.max()):.2g}"
                )

    async def _check(self, server: Server, label: Label | None) -> None:
        """Raise ValueError for a server that does not suit the run."""
        client, adapter = server.client, self._outgoing.adapter
        if label is not None and label.run != self.run and server.loaded:
            raise ValueError(f"expected {client.url} to serve one trainer, but another one has loaded weights into it")
        description = await client.describe()
        _check_equal(client.url, description, self._policy, "the policy has")
        if self._reads_pictures:
            check_pictures(description.max_pictures, client.url)
        if adapter is not None and description.max_lora_rank < adapter.max_lora_rank:
            raise ValueError(
                f"expected {client.url} to take adapters of rank {adapter.max_lora_rank}, got at most "
                f"{description.max_lora_rank}: start it by lightning-rl serve ... -- --enable-lora --max-lora-rank "
                f"{adapter.max_lora_rank}"
            )
        self._description = self._description or description
        _check_equal(client.url, description, self._description._asdict(), "the other servers have")
        if self._text is not None:
            alike = description.has_tokenizer and await client.detokenize(self._ids) == self._text
            if self.has_tokenizer and not alike and self._goal.label is not None:
                raise ValueError(f"expected the trainer's tokenizer at {client.url}, as the other servers have")
            self.has_tokenizer = self.has_tokenizer and alike
        if self._sent:
            await client.compare(self._sent)
        server.described = True  # last, so that a server that was refused is checked again

    def remove(self, server: Server, why: Exception) -> None:
        """Take a server out until it answers again, with a delay that doubles with each loss."""
        unreachable = isinstance(why, Unanswered) and isinstance(server.error, Unanswered)
        if server in self.servers and (server.ready or not (unreachable or str(server.error) == str(why))):
            message = "lost %s: %s; its requests go to other servers until it is back"
            LOG.warning(message, server.client.url, why)
        server.ready, server.error = False, why
        server.due = _now() + min(BACKOFF * 2 ** min(server.losses, MAX_DOUBLINGS), MAX_BACKOFF)
        server.losses += 1
        self._notify()

    async def _watch(self, server: Server) -> None:
        """Check the health of a server and recover it, until it was removed and its requests have ended."""
        while True:
            await asyncio.sleep(POLL if server.ready or not server.listed else max(0.0, server.due - _now()))
            if not server.listed and not server.in_flight:
                return await self._let_go(server)
            try:
                await server.client.check_health()
                unproven = self._canary is not None and self._goal.label is not None and self._goal.logprobs is None
                if unproven and self.ready() and not server.ready:  # the canary checks a ready server first
                    server.due = _now() + BACKOFF
                elif server.listed and not server.ready:
                    await self._refresh(server)
            except Cancelled:
                return None
            except Exception as error:  # noqa: BLE001  the task has to survive, or the server stays lost
                if server.ready:
                    server.client.abort()
                self.remove(server, error)

    async def _let_go(self, server: Server) -> None:
        """Close a removed server."""
        async with server.loading:
            if self.rank == 0:
                with suppress(Unanswered, Refused, Cancelled):
                    await server.client.leave()
            LOG.warning("%s is closed: it was removed from the list, and its requests have ended", server.client.url)
            await server.client.aclose()
            self._open.remove(server)

    def _check_open(self) -> None:
        if self._closed:
            raise Cancelled("the request was cancelled")

    def _notify(self) -> None:
        """Wake all that wait, after a change of a server."""
        self._changed.set()
        self._changed = asyncio.Event()
        if self._closed:
            self._fail(Cancelled("the request was cancelled"))
        self._limit_patience()
        self.assign()

    def _limit_patience(self) -> None:
        """Start the timer that fails waiting requests while no server is ready, or stop it."""
        if self._expiry is not None and (self.ready() or self._closed):
            self._expiry.cancel()
            self._expiry = None
        elif self._expiry is None and not self.ready() and not self._closed:
            self._log_wait()
            self._expiry = asyncio.get_running_loop().call_later(self.patience, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        self._fail(self._none_ready())


def _now() -> float:
    return asyncio.get_running_loop().time()


def _names(servers: Sequence[Server]) -> str:
    return ", ".join(server.client.url for server in servers) or "none"


def _check_equal(url: str, description: WorkerDescription, expected: Mapping[str, Any], who: str) -> None:
    for name, value in expected.items():
        if getattr(description, name) != value:
            got = quote(str(getattr(description, name)))
            raise ValueError(f"expected {name} {value} at {url}, as {who}, got {got}")
