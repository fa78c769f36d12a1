"""VLLMServerEngine: the client of vLLM servers, on this machine or others, that take their weights from the trainer."""

import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rl.distributed import failing_together, process_count, process_objects
from lightning_rl.generation.engine import Completion, Engine, EngineError, EngineState, Request
from lightning_rl.generation.vllm.dispatch import Dispatch
from lightning_rl.generation.vllm.endpoint import Endpoint
from lightning_rl.generation.vllm.http import Calls, Unanswered
from lightning_rl.generation.vllm.pool import Fleet
from lightning_rl.generation.vllm.push import Proof, WeightPush, scored
from lightning_rl.generation.vllm.sampling import CACHING, SCORING, Limits, finish_of, sampling
from lightning_rl.generation.weights.canary import Canary, canary_of
from lightning_rl.generation.weights.stream import (
    Stream,
    adapter_scales,
    as_expected,
    merged_stream,
    owned,
    tied_names,
    with_aliases,
)

KEY = "VLLM_API_KEY"
HERE = ("127.0.0.1", "localhost", "::1")


class Parts(NamedTuple):
    """What an engine consists of once it is started: servers, weights on their way to them, requests."""

    fleet: Fleet
    push: WeightPush
    dispatch: Dispatch

    def bring(self) -> None:
        """Brings every server that is there to the current weights.

        Raises:
            EngineError: if none has them within the patience.
            RuntimeError: if none has them, and one said why.
        """
        errors = self.fleet.refresh()
        for error in errors if not self.fleet.ready() else ():
            if not isinstance(error, Unanswered):
                raise error
        self.fleet.wait_for_one()


class VLLMServerEngine(Engine):
    """Generates with vLLM servers that ``lightning-rl serve`` started, on this machine or others.

    Each sync writes the weights to a folder that trainer and servers share, and every server loads them from there. A
    server that dies loses nothing: its requests are sent to another one, or to the same once it is back and has loaded
    the current weights. A sync does not wait for requests in flight, which go on with the new weights; each token says
    which weights it came from. Under several ranks each has a client of its own, and rank 0 writes the weights.

    Args:
        urls: of the servers, such as ``http://127.0.0.1:8000``. Requests go where the fewest tokens are outstanding.
        api_key: of the servers; by default what ``VLLM_API_KEY`` says.
        storage: a folder that trainer and servers share, under the same path; by default one for temporary files, which
            will do on one machine.
        timeout: seconds for one response, or for one load of the weights.
        patience: seconds without any server until the run ends with an EngineError.
        canary: proves each sync, on every server; None switches it off.

    Raises:
        ValueError: if an argument is out of range, or a server on another machine has no storage to load from.
    """

    scores = True
    filters = True
    holds_copy = True
    syncs_while_generating = True

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        api_key: str | None = None,
        storage: str | Path | None = None,
        timeout: float = 1800.0,
        patience: float = 600.0,
        canary: Canary | bool | None = True,
    ) -> None:
        super().__init__()
        self.urls = (urls,) if isinstance(urls, str) else tuple(urls)
        if not self.urls or len(set(self.urls)) < len(self.urls):
            raise ValueError(f"expected URLs of one or more servers, each of them once, got {list(self.urls)}")
        if not (timeout > 0 and patience > 0):
            raise ValueError(f"expected timeout > 0 and patience > 0, got {timeout} and {patience}")
        self.storage, self.timeout, self.patience = storage, timeout, patience
        self._key = os.environ.get(KEY) if api_key is None else api_key
        self._endpoints()
        elsewhere = [url for url in self.urls if urlsplit(url).hostname not in HERE]
        if elsewhere and storage is None:
            raise ValueError(f"expected storage=, a folder that the machine of {elsewhere[0]} has as well, got none")
        self.canary = canary_of(canary)
        self._parts: Parts | None = None
        self._coming = -1

    def _endpoints(self) -> list[Endpoint]:
        return [Endpoint(url, self._key, self.timeout) for url in self.urls]

    @override
    def start(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Waits for a server, and checks release, model, vocabulary and settings of all that are there.

        Raises:
            EngineError: if none is there within the patience.
            ValueError: if one is not what the run needs.
        """
        if self._parts is not None:
            raise RuntimeError("expected an engine that is not started, got one that is: close() comes first")
        mine = token_hex(4), str(Path(self.storage or tempfile.gettempdir()).resolve())
        run, storage = process_objects(mine)[0]
        self._tied, self._scales = tied_names(model), adapter_scales(model)
        rank = dist.get_rank() if process_count() > 1 else 0
        push = WeightPush(
            run, Path(storage), writes=rank == 0, model=model, tokenizer=tokenizer, canary=self.canary
        )  # fmt: skip
        fleet = Fleet(self._endpoints(), push.admit, patience=self.patience)
        self._parts = Parts(fleet, push, Dispatch(fleet, run, rank))
        for error in fleet.refresh():
            if isinstance(error, ValueError):
                raise error
        fleet.watch()
        fleet.wait_for_one()
        held = push.known()
        self.dtype, self.limit, self.block = getattr(torch, held.dtype), held.limit, held.block

    @override
    def expect(self, weights: Stream) -> None:
        """Compares names and shapes with every server's own, once; those that come later are compared when they come.

        Raises:
            ValueError: naming the server and the first tensor that differs.
        """
        parts = self._running()
        parts.push.sent = [(name, tuple(weight.shape)) for name, weight in self._outgoing(weights)]
        for member in parts.fleet.ready():
            member.endpoint.compare(parts.push.sent)

    def _outgoing(self, weights: Stream) -> Stream:
        return with_aliases(merged_stream(weights, self._scales), self._tied)

    def _running(self) -> Parts:
        if self._parts is None:
            raise RuntimeError("expected a started engine, got one that is not: start() comes first")
        return self._parts

    @override
    def load_weights(self, weights: Stream, version: int) -> None:
        """Takes over the trainer's weights on every server that is there; requests in flight go on with them.

        Raises:
            EngineError: if no server took them within the patience.
            RuntimeError: if the servers could not load them, or another rank failed.
        """
        self._coming = version
        try:
            super().load_weights(weights, version)
        except BaseException:
            self.state = EngineState.AWAKE
            raise

    @override
    @torch.no_grad()
    def _take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Rank 0 writes the weights and has the servers load them; the others read the stream and ask who has them.

        The stream is read to its end even after a failure, because other ranks take part in gathering it.
        """
        parts, rest, before = self._running(), iter(weights), None
        push = parts.push
        with failing_together("a push of the weights", EngineError):
            try:
                if push.writes:
                    stream = as_expected(self._outgoing(rest), dict(push.sent))
                    before = push.write(owned(stream, self.dtype or torch.float32, torch.device("cpu")), self._coming)
                    parts.bring()
            finally:
                for _ in rest:
                    pass
        if not push.writes:
            push.current = push.following(self._coming)
            parts.bring()
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
        parts.dispatch.oldest = push.latest().number

    @override
    def _draw(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        """Draws one completion for each request, each exactly once.

        Raises:
            ValueError: if a request cannot be kept as it is; none has been sent then.
            EngineError: if no server answered. Requests in flight have been cut short then, and the servers ended them.
        """
        parts = self._running()
        held = parts.push.known()
        limits = Limits(tokens=held.limit, vocabulary=held.vocabulary, speaks=parts.push.speaks)
        for request in requests:
            limits.check(request)
        oldest = parts.dispatch.oldest
        return parts.fleet.each(partial(_drawn, parts.dispatch, oldest=oldest, logprobs=logprobs), requests)

    @override
    def score(self, rows: Sequence[Sequence[int]]) -> list[Float[Tensor, " L1"]]:
        parts = self._running()

        def scored_by_one(ids: Sequence[int], calls: Calls) -> Tensor:
            return scored(parts.dispatch.ask(ids, SCORING, calls, name="score", oldest=parts.dispatch.oldest))

        return parts.fleet.each(scored_by_one, rows)

    @override
    def score_copies(self, ids: Sequence[int]) -> dict[str, Float[Tensor, " L1"]]:
        parts = self._running()
        samples = parts.dispatch.ask_all(ids, SCORING, name="canary")
        found = {url: scored(sample) for url, sample in samples.items()}
        parts.push.proof = Proof(parts.push.latest(), tuple(ids), next(iter(found.values())))
        return found

    @override
    def cached_tokens(self, ids: Sequence[int]) -> int:
        """The most that any server had in its cache."""
        samples = self._running().dispatch.ask_all(ids, CACHING, name="cached")
        return max(sample.cached for sample in samples.values())

    @override
    def close(self) -> None:
        """Cuts every call short and removes the weights that were written; the servers go on."""
        super().close()
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.fleet.close()
            parts.push.close()
        if self.canary is not None:
            self.canary.forget()


def _drawn(dispatch: Dispatch, request: Request, calls: Calls, *, oldest: int, logprobs: bool) -> Completion:
    parameters, name = sampling(request, logprobs=logprobs), f"{request.sample_id}-{request.turn}"
    sample = dispatch.ask(request.prefix_ids, parameters, calls, name=name, oldest=oldest)
    versions = tuple(label.version for label in sample.labels)
    return Completion(
        token_ids=sample.token_ids, logprobs=sample.logprobs, version=versions[0],
        finish=finish_of(request, sample.token_ids, sample.finish_reason, sample.stop_reason),
        versions=None if len(set(versions)) == 1 else versions,
    )  # fmt: skip
