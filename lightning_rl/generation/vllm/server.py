"""VLLMServerEngine: the client of vLLM servers, on this machine or others, that take their weights from the trainer."""

import asyncio
import gc
import os
import shutil
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rl.arguments import check_counts, check_numbers
from lightning_rl.distributed import failing_together, process_count, process_objects, process_store
from lightning_rl.generation.engine import Capabilities, Completion, Engine, EngineError, Exchange, Request
from lightning_rl.generation.vllm.address import LOOPBACK
from lightning_rl.generation.vllm.broadcast import Broadcast
from lightning_rl.generation.vllm.endpoint import Endpoint
from lightning_rl.generation.vllm.http import Address, trust
from lightning_rl.generation.vllm.members import Listing, Members, Membership
from lightning_rl.generation.vllm.places import URGENT, Seat
from lightning_rl.generation.vllm.pool import ServerPool
from lightning_rl.generation.vllm.push import Proof, WeightPush, prompt_logprobs
from lightning_rl.generation.vllm.sampling import CACHING, SCORING, Limits, finish_of, parameters_of
from lightning_rl.generation.weights import stream
from lightning_rl.generation.weights.buckets import Specification
from lightning_rl.generation.weights.canary import Canary, canary_of
from lightning_rl.policy.text_model import check_text_only

TRANSFERS = ("file", "broadcast")


class VLLMServerEngine(Engine):
    """Generates with vLLM servers that ``lightning-rl serve`` started, on this machine or others.

    Each sync writes the weights to a folder that trainer and servers share, and every server loads them from there; or
    it sends them to all servers at once. A server that dies loses nothing: its requests are sent to another one, or to
    the same once it is back and has loaded the current weights. A sync does not wait for requests in flight, which go
    on with the new weights; each token says which weights it came from. Under several ranks each has a client of its
    own, and rank 0 brings the weights.

    From its start to its end whatever lived at its start is left out of garbage collections (``gc.freeze``), which else
    are half of what requests cost the trainer.

    Args:
        servers: their URLs, such as ``http://127.0.0.1:8000``; requests go where the fewest tokens are outstanding. A
            :class:`pathlib.Path` is a file with one URL on each line, and a function returns them: rank 0 reads either
            once a second, so servers may come and go while a run goes on.
        api_key: the key of the servers; by default the value of the environment variable ``VLLM_API_KEY``.
        ca: a file with the certificate that signs those of ``https`` servers; by default those that the machine trusts.
        transfer: how weights reach the servers. ``"file"``: through ``storage``. ``"broadcast"``: from memory to
            memory, in a process group of rank 0 and the servers' workers (NCCL between GPUs, gloo otherwise); rank 0
            keeps a copy in main memory, which a server that was not reached, or comes back, loads from ``storage``.
        storage: a folder that trainer and servers share, under the same path; by default one for temporary files, which
            will do on one machine.
        timeout: seconds for one response, to its last byte, or for one load of the weights.
        patience: seconds without any server, or without a list of them, until the run ends with an EngineError.
        at_once: requests that a server is sent at the same time; as many as it decodes together (vLLM's
            ``max_num_seqs``), or it decodes fewer than it could.
        canary: proves each sync, on every server; None switches it off.

    Raises:
        ValueError: if an argument is out of range, or a server on another machine has no storage to load from.
    """

    capabilities = Capabilities(filters=True, scores=True, syncs_while_generating=True, concurrent=True)
    holds_copy = True

    def __init__(
        self,
        servers: Listing,
        *,
        api_key: str | None = None,
        ca: str | Path | None = None,
        transfer: Literal["file", "broadcast"] = "file",
        storage: str | Path | None = None,
        timeout: float = 1800.0,
        patience: float = 600.0,
        at_once: int = 256,
        canary: Canary | bool | None = True,
    ) -> None:
        super().__init__()
        self.servers = servers if callable(servers) or isinstance(servers, str | Path) else tuple(servers)
        check_numbers(above=0, finite=True, timeout=timeout, patience=patience)
        check_counts(1, at_once=at_once)
        if transfer not in TRANSFERS:
            raise ValueError(f"expected transfer out of {', '.join(TRANSFERS)}, got {transfer!r}")
        self.transfer = transfer
        self.storage, self.timeout, self.patience, self.at_once = storage, timeout, patience, at_once
        self.ca = None if ca is None else Path(ca)
        if self.ca is not None:
            trust(self.ca)
        self._key = os.environ.get("VLLM_API_KEY") if api_key is None else api_key
        self._members = Members(self.servers, self._check_url)
        self.canary = canary_of(canary)
        self._pool: ServerPool | None = None
        self._membership: Membership | None = None
        self._broadcast: Broadcast | None = None

    def _check_url(self, url: str) -> None:
        if Address.read(url).host not in LOOPBACK and self.storage is None:
            raise ValueError(f"expected storage=, a folder that the machine of {url} has as well, got none")

    def _endpoint(self, url: str) -> Endpoint:
        return Endpoint(url, self._key, self.timeout, self.ca)

    @override
    def start(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Waits for a server, and checks release, model, vocabulary and settings of all that are there.

        Raises:
            EngineError: if none is there, or listed, within the patience.
            ValueError: for a model with towers, and if a server is not what the run needs; of servers that may change,
                if all are such.
        """
        if self._pool is not None:
            raise RuntimeError("expected an engine that is not started, got one that is: close() comes first")
        check_text_only(model, "VLLMServerEngine")
        rank = dist.get_rank() if process_count() > 1 else 0
        with failing_together("a list of servers", EngineError):
            urls = self._members.wait(self.patience) if rank == 0 else ()
        proposal = token_hex(4), str(Path(self.storage or tempfile.gettempdir()).resolve()), urls
        run, storage, urls = process_objects(proposal)[0]
        self._aliases, self._scales = stream.aliases_of(model), stream.adapter_scales(model)
        self._exact = frozenset(name for name, _ in stream.persistent_buffers(model))
        canary = self.canary if isinstance(self.canary, Canary) else None
        push = WeightPush(
            run,
            Path(storage),
            writes=rank == 0,
            model=model,
            tokenizer=tokenizer,
            canary=canary,
            private=self.storage is None,
        )
        source, endpoints = self._members.source, [self._endpoint(url) for url in urls]
        pool = self._pool = ServerPool(
            endpoints, push, patience=self.patience, rank=rank, at_once=self.at_once, source=source
        )
        push.open()
        for error in pool.refresh():
            if isinstance(error, ValueError) and self._members.fixed:
                raise error
        pool.watch()
        self._membership = Membership(
            self._members,
            urls,
            lambda urls: pool.follow(urls, self._endpoint),
            store=process_store(),
            name=f"lightning-rl/servers/{run}",
            reads=rank == 0,
        )
        pool.wait(strict=True)
        served = push.description
        self.dtype, self.allows_tf32 = getattr(torch, served.dtype), served.device != "cpu"
        self.max_length, self.block_size = served.max_length, served.block_size
        gc.collect()
        gc.freeze()  # or what a thousand answers leave behind has the collector look through all that lives by now

    @override
    def expect(self, weights: stream.Stream) -> None:
        """Compares names and shapes with every server's; those that come later are compared when they come."""
        pool, tensors, device = self._running(), list[Specification](), torch.device("cpu")
        for name, weight in self._outgoing(weights):
            dtype = self.dtype if weight.is_floating_point() and name not in self._exact else weight.dtype
            tensors.append((name, tuple(weight.shape), str(dtype).removeprefix("torch.")))
            device = weight.device
        pool.compare([(name, shape) for name, shape, _ in tensors])
        if self.transfer == "broadcast" and pool.push.writes:
            self._broadcast = Broadcast(pool, tensors, device)

    def _outgoing(self, weights: stream.Stream) -> stream.Stream:
        return stream.add_aliases(stream.merge_stream(weights, self._scales), self._aliases)

    def _running(self) -> ServerPool:
        if self._pool is None:
            raise RuntimeError("expected a started engine, got one that is not: start() comes first")
        return self._pool

    @override
    @torch.no_grad()
    def _take(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Rank 0 brings the weights to the servers; the others read the stream and ask who has them.

        The stream is read to its end even after a failure, because other ranks take part in gathering it. Requests in
        flight go on with the new weights.
        """
        pool, rest, before = self._running(), iter(weights), None
        push = pool.push
        with failing_together("a push of the weights", EngineError):
            try:
                if push.writes:
                    before = self._bring(stream.verify(self._outgoing(rest), dict(push.sent)), version)
                    pool.update()
            finally:
                deque(rest, maxlen=0)
        if not push.writes:
            push.advance(push.next_label(version))
            pool.update()
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
        pool.oldest = push.label.number

    def _bring(self, weights: stream.Stream, version: int) -> Path | None:
        """Sends weights or writes them; returns the folder of those before."""
        push, broadcast = self._running().push, self._broadcast
        if broadcast is not None:
            return push.send(lambda label: broadcast.send(weights, label), version)
        return push.write(stream.copies(weights, self.dtype, torch.device("cpu"), self._exact), version)

    @override
    def _draw(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        """If one fails, all others are cut short, and the servers end what they were doing for them.

        Requests with the same prompt go to one server, each by itself: in one request with a number of samples vLLM
        would give them consecutive seeds, which theirs are not.
        """
        draw, seats = self._drawer(logprobs=logprobs), defaultdict[tuple[int, ...], Seat](Seat)
        for request in requests:
            draw.limits.check(request)
            seats[request.prefix_ids].tokens += len(request.prefix_ids) + request.sampling.max_new_tokens

        async def answer(request: Request) -> Completion:
            return await draw(request, seats[request.prefix_ids])

        return self._running().run(answer, requests)

    @override
    def _converse(self, exchange: Exchange, *, logprobs: bool) -> None:
        """Each request by itself, at the server that answered the turn before, which has its prefix in its cache.

        Conversations that begin alike stay together. Tokens may come from the weights of the beginning or later ones,
        turn by turn and within a turn.
        """
        draw, seats = self._drawer(logprobs=logprobs), dict[int, Seat]()
        beginnings = defaultdict[tuple[int, ...], Seat](Seat)

        async def answer(request: Request) -> None:
            try:
                self._check_requests([request])
                draw.limits.check(request)
                if request.sample_id not in seats:
                    seats[request.sample_id] = beginnings[request.prefix_ids]
                completion = await draw(request, seats[request.sample_id])
                await asyncio.get_running_loop().run_in_executor(threads, exchange.give, request, completion)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001  for the thread that waits
                exchange.fail(error)

        with ThreadPoolExecutor(self.at_once, thread_name_prefix="turn") as threads:  # in which environments may answer
            self._running().each(answer, exchange.take)

    def _drawer(self, *, logprobs: bool) -> "_Drawer":
        pool = self._running()
        limits = Limits(
            max_length=pool.push.description.max_length,
            vocabulary=pool.push.description.vocabulary,
            has_tokenizer=pool.push.has_tokenizer,
        )
        return _Drawer(pool=pool, limits=limits, oldest=pool.oldest, logprobs=logprobs, answered=self._note_answer)

    def _note_answer(self, request: Request) -> None:
        self.in_flight.discard(request)

    @override
    def score(self, rows: Sequence[Sequence[int]]) -> list[Float[Tensor, " L1"]]:
        pool = self._running()

        async def score(ids: Sequence[int]) -> Tensor:
            return prompt_logprobs(await pool.ask(ids, SCORING, name="score", oldest=pool.oldest, rank=URGENT))

        return pool.run(score, rows)

    @override
    def score_copies(self, ids: Sequence[int]) -> dict[str, Float[Tensor, " L1"]]:
        pool = self._running()
        scores = {url: prompt_logprobs(sample) for url, sample in pool.ask_all(ids, SCORING, name="canary").items()}
        pool.accept(Proof(pool.push.label, tuple(ids), next(iter(scores.values()))), scores.keys())
        return scores

    @override
    def count_cached_tokens(self, ids: Sequence[int]) -> int:
        """The most that any server had in its cache.

        Every rank asks the same servers, so each has entries of its own, or it would find those of another.
        """
        pool = self._running()
        samples = pool.ask_all(ids, CACHING, name="cached", salt=f"rank {pool.rank}")
        return max(sample.cached for sample in samples.values())

    @override
    def close(self) -> None:
        """Cuts every call short and removes the weights that were written; the servers go on."""
        super().close()
        pool, self._pool = self._pool, None
        membership, self._membership = self._membership, None
        if membership is not None:
            membership.close()
        broadcast, self._broadcast = self._broadcast, None
        if broadcast is not None:
            broadcast.close()
        if pool is not None:
            gc.unfreeze()
            pool.close()
            pool.push.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawer:
    """Draws for one request after the other, from weights that are no older than those of its beginning."""

    pool: ServerPool
    limits: Limits
    oldest: int  # number of the push
    logprobs: bool
    answered: Callable[[Request], None]

    async def __call__(self, request: Request, seat: Seat | None = None) -> Completion:
        parameters, name = parameters_of(request, logprobs=self.logprobs), f"{request.sample_id}-{request.turn}"
        sample = await self.pool.ask(
            request.prefix_ids, parameters, name=name, oldest=self.oldest, seat=seat, rank=request.rollout
        )
        self.answered(request)
        versions = tuple(label.version for label in sample.labels)
        return Completion(
            token_ids=sample.token_ids,
            logprobs=sample.logprobs,
            finish=finish_of(request, sample.token_ids, sample.finish_reason, sample.stop_reason),
            version=versions[0],
            versions=None if len(set(versions)) == 1 else versions,
        )
