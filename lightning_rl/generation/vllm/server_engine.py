"""Engine on vLLM servers, on this machine or others, whose weights the trainer pushes."""

import gc
import os
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rl.distributed import failing_together, process_count, process_objects
from lightning_rl.generation.engine import Capabilities, Engine, EngineError
from lightning_rl.generation.sessions import Sessions
from lightning_rl.generation.vllm import vllm_sampling
from lightning_rl.generation.vllm.address import LOOPBACK
from lightning_rl.generation.vllm.discovery import Listing, ServerList
from lightning_rl.generation.vllm.fleet import Fleet, Seat, ServerRequest
from lightning_rl.generation.vllm.server_client import ServerClient
from lightning_rl.generation.vllm.storage import WeightFolder, delete_leftovers
from lightning_rl.generation.vllm.vllm_sampling import SCORING, Limits, finish_of, parameters_of, pictures_of
from lightning_rl.generation.vllm.vllm_weights import VLLMWeights
from lightning_rl.generation.weights import weight_stream
from lightning_rl.generation.weights.canary import Canary, canary_of
from lightning_rl.policy.media import placeholders_of
from lightning_rl.policy.processor import processor_of
from lightning_rl.rollout import TOP_IDS, TOP_LOGPROBS, FinishReason
from lightning_rl.samples import Completion, Request
from lightning_rl.utils.arguments import check_counts, check_numbers
from lightning_rl.utils.event_loop import REQUESTS, run_all
from lightning_rl.utils.http import read_url

TRANSFERS = ("file", "broadcast")


class VLLMServerEngine(Engine):
    """Engine on vLLM servers that ``lightning-rl serve`` started, on this machine or others.

    Each sync writes the weights to a folder shared with the servers, which load them from there, or broadcasts them to
    all servers. If a server dies, its requests are sent to another one, or to the same once it has restarted and
    loaded the current weights. A sync does not wait for requests in flight, which continue with the new weights; each
    token records its version. With several ranks each one has its own client, and rank 0 pushes the weights.

    While the engine is started, objects that existed before are excluded from garbage collection (``gc.freeze``),
    which otherwise takes half of the trainer's time for requests.

    Args:
        servers: URLs such as ``http://127.0.0.1:8000``; requests go to the server with the fewest outstanding tokens.
            A :class:`pathlib.Path` is a file with one URL per line, and a function returns them: every rank reads
            either once a second, so servers may come and go during a run.
        api_key: Key of the servers; by default the environment variable ``VLLM_API_KEY``.
        transfer: Path of weights to the servers. ``"file"``: through ``storage``. ``"broadcast"``: in a process group
            of rank 0 and the servers' workers (NCCL between GPUs, otherwise gloo); rank 0 keeps a copy in main memory,
            which servers that were not reached or return later load from ``storage``.
        lora: ``"merged"`` sends all weights with the adapter merged at each sync; ``"adapter"`` sends the base once
            and then only the adapter through ``storage``, for policies that train nothing else. Requests in flight
            continue with the adapter of their start.
        storage: Folder shared by trainer and servers, with the same path; by default one for temporary files, which
            suffices on one machine.
        timeout: Seconds for one complete response, or for one load of the weights.
        patience: Seconds without a ready server, or without a list, after which the run ends with an EngineError.
        at_once: Maximum number of concurrent requests at each server; best equal to vLLM's ``max_num_seqs``.
        canary: Check of each sync on every server; None to skip it.

    Raises:
        ValueError: If an argument is out of range, or a server on another machine has no storage to load from.
    """

    capabilities = Capabilities(
        filters=True,
        scores=True,
        extras=frozenset((TOP_IDS, TOP_LOGPROBS)),
        syncs_while_generating=True,
        concurrent=True,
        pictures=True,
        temperatures=vllm_sampling.TEMPERATURES,
    )
    holds_copy = True

    def __init__(
        self,
        servers: Listing,
        *,
        api_key: str | None = None,
        transfer: Literal["file", "broadcast"] = "file",
        lora: Literal["merged", "adapter"] = "merged",
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
        if lora not in ("merged", "adapter"):
            raise ValueError(f'expected lora="merged" or "adapter", got {lora!r}')
        self.transfer, self.lora = transfer, lora
        self.storage, self.timeout, self.patience, self.at_once = storage, timeout, patience, at_once
        self.environment_threads = at_once
        self._key = os.environ.get("VLLM_API_KEY") if api_key is None else api_key
        self._list = ServerList(self.servers, self._check_url)
        self.canary = canary_of(canary)
        self._fleet: Fleet | None = None
        self._placeholders: list[int] = []  # token ids that stand for pictures

    def _check_url(self, url: str) -> None:
        if read_url(url).hostname not in LOOPBACK and self.storage is None:
            raise ValueError(f"expected storage=, a folder shared with the machine of {url}, got none")

    @override
    def start(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Wait for a server, and check release, model, vocabulary and settings of all that can be reached.

        Raises:
            EngineError: If none is ready, or listed, within the patience.
            ValueError: If the model trains more than an adapter that is to be sent alone, or a server does not suit the
                run; if the list may change, only if all are unsuitable.
        """
        if self._fleet is not None:
            raise RuntimeError("expected an engine that is not started, got a started one: call close() first")
        outgoing = VLLMWeights(model, lora=self.lora, pictures=processor_of(tokenizer) is not None)
        if outgoing.unties:
            raise ValueError(
                "expected embeddings and vocabulary head with one weight, as servers build them, got modules_to_save "
                "that train one of them alone: use VLLMEngine(), or a model with tie_word_embeddings=False"
            )
        rank = dist.get_rank() if process_count() > 1 else 0
        with failing_together("a list of servers", EngineError):
            urls = self._list.wait(self.patience)
        run, storage = process_objects((token_hex(4), str(Path(self.storage or tempfile.gettempdir()).resolve())))[0]
        self._placeholders = placeholders_of(model.config)
        fleet = self._fleet = Fleet(
            urls,
            self._list,
            lambda url: ServerClient(url, self._key, self.timeout),
            WeightFolder(Path(storage), run, private=self.storage is None),
            outgoing,
            model=model,
            tokenizer=tokenizer,
            canary=self.canary,
            patience=self.patience,
            rank=rank,
            at_once=self.at_once,
        )
        fleet.start()
        served = fleet.description
        self.dtype, self.allows_tf32, self.max_length = fleet.dtype, served.device != "cpu", served.max_length
        gc.collect()
        gc.freeze()  # or the garbage of a thousand answers makes the collector traverse all live objects

    @override
    def expect(self, weights: weight_stream.Weights) -> None:
        """Compare names and shapes with those of every server; servers that join later are compared then."""
        self._running().expect(weights, self.transfer)

    def _running(self) -> Fleet:
        if self._fleet is None:
            raise RuntimeError("expected a started engine, got one that is not: call start() first")
        return self._fleet

    @override
    @torch.no_grad()
    def load_stream(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Push the weights from rank 0 to the servers; the other ranks read the stream and wait for the servers.

        The stream is read to its end even after a failure, because other ranks take part in gathering it. Requests in
        flight continue with the new weights, or with the adapter that they name.
        """
        fleet, rest = self._running(), iter(weights)
        with failing_together("a push of the weights", EngineError):
            try:
                if fleet.rank == 0:
                    fleet.publish(rest, version)
            finally:
                deque(rest, maxlen=0)
        if fleet.rank != 0:
            fleet.publish((), version)
        oldest = version
        if self.lora == "adapter":  # vLLM may read the adapter of a request in flight again
            oldest = min(
                (used for used in process_objects(self.in_flight.oldest()) if used is not None), default=version
            )
        fleet.settle(oldest)

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        """Return completions; after a failure all other requests are cancelled.

        Requests with the same prompt go to one server, but separately: vLLM gives the samples of one request
        consecutive seeds.
        """
        return REQUESTS.run(run_all(map(self._answering(requests, logprobs=logprobs), requests)))

    @override
    async def serve(self, sessions: Sessions, *, logprobs: bool) -> None:
        """Send each request to the server of the previous turn, whose prefix cache has its beginning.

        Samples with the same beginning share a server. Tokens may come from the weights at the start or later ones,
        from turn to turn and within a turn.
        """
        await sessions.answer_each(self._answering(None, logprobs=logprobs))

    def _answering(
        self, requests: Sequence[Request] | None, *, logprobs: bool
    ) -> Callable[[Request], Coroutine[Any, Any, Completion]]:
        """Return the function that answers requests of one call, which are checked; None for those of open samples."""
        fleet, seats, beginnings = self._running(), dict[int, Seat](), defaultdict[tuple[int, ...], Seat](Seat)
        oldest, served = fleet.oldest, fleet.description
        limits = Limits(
            max_length=served.max_length,
            vocabulary=served.vocabulary,
            has_tokenizer=fleet.has_tokenizer,
            placeholders=self._placeholders,
            max_pictures=served.max_pictures,
        )
        for request in requests or ():
            limits.check(request)

        async def answer(request: Request) -> Completion:
            seat = beginnings[request.prefix_ids]
            if requests is None:
                limits.check(request)
                seat = seats.setdefault(request.sample_id, seat)
            parameters, name = parameters_of(request, logprobs=logprobs), f"{request.sample_id}-{request.turn}"
            if TOP_IDS in self.extras:
                parameters["logprobs"] = min(self.top_logprobs or limits.vocabulary, limits.vocabulary)
            sent = ServerRequest(name, request.prefix_ids, parameters, oldest, request.rollout, pictures_of(request))
            with self.in_flight.holding([request], self.version):
                sample = await fleet.complete(sent, seat)
            finish, versions = FinishReason.ABORT, tuple(label.version for label in sample.labels)
            if limits.reads(request, sample.prompt_ids):
                finish = finish_of(request, sample.token_ids, sample.finish_reason, sample.stop_reason)
            return Completion(
                token_ids=sample.token_ids,
                logprobs=sample.logprobs,
                finish=finish,
                version=versions[0],
                versions=None if len(set(versions)) == 1 else versions,
                token_extras=sample.token_extras,
            )

        return answer

    @override
    def score(self, rows: Sequence[Sequence[int]]) -> list[Float[Tensor, " L1"]]:
        fleet = self._running()

        async def score(ids: Sequence[int]) -> Tensor:
            return (await fleet.complete(ServerRequest("score", ids, SCORING, fleet.oldest))).prompt_logprobs

        return REQUESTS.run(run_all(map(score, rows)))

    @override
    def score_copies(self, ids: Sequence[int]) -> dict[str, Float[Tensor, " L1"]]:
        return REQUESTS.run(self._running().score_copies(ids))

    @override
    def close(self) -> None:
        """Cancel every call and delete the written weights; the servers keep running."""
        super().close()
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            gc.unfreeze()
            fleet.close()
        else:  # a resumed run may have had nothing left to generate
            delete_leftovers(Path(self.storage or tempfile.gettempdir()))
