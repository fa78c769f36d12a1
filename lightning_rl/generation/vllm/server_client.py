"""Client of one vLLM server: its description, loading of weights, sampling, and the label of each token's weights."""

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rl.generation.vllm.group import GroupError, Invitation, Specification
from lightning_rl.generation.vllm.vllm_sampling import FINISH
from lightning_rl.generation.vllm.vllm_version import check_version
from lightning_rl.generation.vllm.worker_extension import WorkerDescription
from lightning_rl.generation.weights.weight_stream import Shape
from lightning_rl.rollout import TOP_IDS, TOP_LOGPROBS
from lightning_rl.utils.http import Client, Refused, Unanswered, quote

PROBE = 30.0  # seconds for a call that returns at once
LEAVING = 5.0  # seconds for a call to a server that is not used any more
LOADING = "loading"  # label while weights are incomplete
NO_LOGPROB = -9999.0  # value that vLLM sends for -inf and NaN
HINTS = {
    401: "pass the key of lightning-rl serve as api_key=, or set VLLM_API_KEY",
    403: "start the server by lightning-rl serve",
    404: "start the server by lightning-rl serve",
}
REQUIRED = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}


class Label(NamedTuple):
    """Identifier of the weights that a token was sampled from, as attached by the server."""

    run: str  # random name of the run that pushed them
    number: int  # number of the push in this run; increases even if the version does not
    version: int

    def __str__(self) -> str:
        """Return the label as servers store it."""
        return f"{self.run}/{self.number}/{self.version}"

    @staticmethod
    def read(text: str) -> "Label | None":
        """Parse ``str(label)``; return None for a server without weights of a trainer, or with incomplete ones."""
        match = re.fullmatch(r"(\w+)/([0-9]{1,9})/([0-9]{1,9})", text)
        return None if match is None else Label(match[1], int(match[2]), int(match[3]))


class Member(NamedTuple):
    """Worker of a server."""

    group: str  # name of its group; empty without one
    gpu: str  # UUID; empty on a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Response of a server to one request."""

    token_ids: tuple[int, ...]
    logprobs: Tensor | None  # float32; None if not requested
    prompt_logprobs: Tensor  # of each prompt token but the first; empty if not requested
    finish_reason: str  # as named by vLLM
    stop_reason: str | int | None  # stop string or id
    labels: tuple[Label, ...]  # of the weights of each token
    token_extras: Mapping[str, Tensor]  # likeliest tokens; empty if not requested
    prompt_ids: tuple[int, ...]  # as vLLM read them, with as many placeholders as pictures need


class ServerClient(Client):
    """Client of one vLLM server; ``timeout`` is in seconds, for one response or load.

    Every call may raise :class:`Unanswered` (also for invalid answers) or :class:`Refused`.

    Attributes:
        adapter: Label of the LoRA adapter that requests name; None to sample from the weights alone.
    """

    def __init__(self, url: str, key: str | None, timeout: float) -> None:
        super().__init__(url, key, HINTS)
        self.timeout = timeout
        self.adapter: Label | None = None

    async def check_health(self) -> None:
        """Return if the server accepts requests."""
        await self.request("GET", "/health", timeout=PROBE)

    async def describe(self) -> WorkerDescription:
        """Return the server's description.

        Raises:
            ValueError: If it was not started with the settings that the engine needs.
        """
        answer = await self.request("GET", "/version", timeout=PROBE)
        try:
            with self._parsing():
                check_version(str(answer["version"]))
        except ImportError as error:
            raise ValueError(f"{self.url}: {quote(str(error))}") from error
        results = await self._on_workers("lightning_rl_describe")
        with self._parsing():
            description = WorkerDescription(**results[0])
        for name, value in REQUIRED.items():
            if (got := getattr(description, name)) != value:
                raise ValueError(f"expected {name} {value} at {self.url}, got {quote(got)}: use lightning-rl serve")
        return description

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, decoded by the server's tokenizer."""
        answer = await self._post("/detokenize", {"tokens": list(ids)})
        with self._parsing():
            return str(answer["prompt"])

    async def compare(self, sent: Sequence[tuple[str, Shape]]) -> None:
        """Compare the names and shapes of the synced tensors with the server's.

        Raises:
            ValueError: If a tensor differs; names the first one.
        """
        for result in await self._on_workers("lightning_rl_compare", [(name, list(shape)) for name, shape in sent]):
            if "error" in result:
                raise ValueError(f"{self.url}: {quote(str(result['error']))}")

    async def label(self) -> Label | None:
        """Return the label of the server's weights, or None if no trainer has pushed any."""
        answer = await self.request("GET", "/weight_info", timeout=self.timeout)
        with self._parsing():
            return Label.read(str(answer["weight_version"]))

    async def load(self, folder: Path, label: Label) -> None:
        """Load the weights of a folder. Requests in flight pause and continue with the new weights.

        Until the load succeeds, the server has a label that no trainer accepts.

        Raises:
            RuntimeError: If the server could not load them.
        """
        await self._replace_weights("lightning_rl_load", str(folder), label)

    async def load_adapter(self, folder: Path, label: Label) -> None:
        """Load the LoRA adapter of a folder, named by its label. Requests in flight keep the adapter that they name.

        vLLM drops the least recently used one of more than ``max_loras``, and reads it again for a request in flight.
        """
        body = {"lora_name": str(label), "lora_path": str(folder)}
        try:
            await self.request("POST", "/v1/load_lora_adapter", body, timeout=self.timeout, parse=bytes.decode)
        except Refused as error:
            if not error.of_request:  # else it has one of this name, whose load was not confirmed
                raise
        await self._post("/update_weight_version", {"new_version": str(label)})

    async def receive(self, group: str, label: Label) -> None:
        """Load weights that are broadcast in a group, otherwise as :meth:`load`.

        Raises:
            RuntimeError: If the server received all weights but could not load them.
            GroupError: If it is not a member any more.
        """
        await self._replace_weights("lightning_rl_receive", group, label)

    async def _replace_weights(self, method: str, source: str, label: Label) -> None:
        await self._post("/pause?mode=keep&clear_cache=false")
        try:
            await self.clear_label()
            results = await self._on_workers(method, source)
            for why in [str(result["left"]) for result in results if "left" in result]:
                raise GroupError(f"{self.url} left group {source}: {quote(why)}")
            for why in [str(result["error"]) for result in results if "error" in result]:
                raise RuntimeError(f"expected {self.url} to load weights, but it failed: {quote(why)}")
            answer = await self._post("/reset_prefix_cache?reset_running_requests=true")
            with self._parsing():
                reset = answer["success"]
            if reset is not True:
                raise RuntimeError(f"expected {self.url} to drop its prefix cache, but it did not")
            await self._post("/reset_encoder_cache")  # features of pictures
            await self._post("/update_weight_version", {"new_version": str(label)})
        finally:
            await self._post("/resume")

    async def members(self) -> list[Member]:
        """Return the group and the GPU of each process that holds a part of the server's weights."""
        results = await self._on_workers("lightning_rl_member")
        with self._parsing():
            return [Member(str(result["group"]), str(result["gpu"])) for result in results]

    async def join(self, invitation: Invitation, first: int, tensors: Sequence[Specification]) -> None:
        """Make every worker join a group, with ranks from ``first`` on.

        Raises:
            GroupError: If a worker could not join.
        """
        for result in await self._on_workers("lightning_rl_join", invitation, first, tensors):
            if "error" in result:
                raise GroupError(f"expected {self.url} to join a group, but it failed: {quote(str(result['error']))}")

    async def leave(self) -> None:
        """Make every worker leave its group."""
        await self.request("POST", "/collective_rpc", {"method": "lightning_rl_leave", "args": []}, timeout=LEAVING)

    async def clear_label(self) -> None:
        """Replace the label of the server's weights, so that no trainer accepts tokens from them."""
        await self._post("/update_weight_version", {"new_version": LOADING})

    async def draw(
        self, name: str, ids: Sequence[int], parameters: Mapping[str, Any], pictures: Mapping[str, Any] | None = None
    ) -> Sample:
        """Return the response to a request with a new name, under vLLM's sampling parameters.

        ``pictures`` are the entries of the request that :func:`.pictures_of` returns.
        """
        body, adapter = {"request_id": name, "token_ids": list(ids), "sampling_params": dict(parameters)}, self.adapter
        body |= pictures or {}
        if adapter is not None:
            body["model"] = str(adapter)
        answer = await self.request("POST", "/inference/v1/generate", body, timeout=self.timeout)
        with self._parsing():
            (choice,) = answer["choices"]
            tokens, logprobs, prompt_logprobs = tuple(choice["token_ids"]), None, torch.zeros(0)
            extras = dict[str, Tensor]()
            if parameters.get("logprobs") is not None:
                content = choice["logprobs"]["content"]
                if tuple([entry["token_id"] for entry in content]) != tokens:
                    raise ValueError("log-probabilities of other tokens")
                logprobs = _logprobs([entry["logprob"] for entry in content])
                if number := parameters["logprobs"]:
                    extras = _top_tokens([entry["top_logprobs"] for entry in content], number)
            if parameters.get("prompt_logprobs") is not None:
                entries = zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)
                prompt_logprobs = _logprobs([entry[str(token)]["logprob"] for token, entry in entries])
            if choice["finish_reason"] not in FINISH:
                raise ValueError(f"the finish reason {choice['finish_reason']!r}, none of {', '.join(FINISH)}")
            labels = _labels(choice, len(tokens))
            if adapter is not None:
                if answer["model"] != str(adapter) or {label.run for label in labels} - {adapter.run}:
                    raise ValueError(f"tokens of {answer['model']} with labels {set(labels)} for adapter {adapter}")
                labels = (adapter,) * len(tokens)
            return Sample(
                token_ids=tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                finish_reason=choice["finish_reason"],
                stop_reason=choice["stop_reason"],
                labels=labels,
                token_extras=extras,
                prompt_ids=tuple(answer["prompt_token_ids"] if pictures else ids),
            )

    @contextmanager
    def _parsing(self) -> Iterator[None]:
        try:
            yield
        except (LookupError, TypeError, ValueError) as error:
            what = quote(f"{type(error).__name__}: {error}")
            raise Unanswered(f"expected an answer from {self.url} that vLLM gives, got {what}") from error

    async def _on_workers(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        answer = await self._post("/collective_rpc", {"method": method, "args": arguments})
        with self._parsing():
            return answer["results"]

    async def _post(self, path: str, body: Any = None) -> Any:
        return await self.request("POST", path, body, timeout=self.timeout)


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


def _labels(choice: Mapping[str, Any], tokens: int) -> tuple[Label, ...]:
    """Return the label of each token; raise :class:`Unanswered` for weights that no trainer pushed."""
    labels: list[Label] = []
    for span in choice["weight_versions"] or []:
        label = Label.read(span["version"])
        if label is None:
            raise Unanswered(
                f"expected tokens of weights pushed by a trainer, got weights labeled {quote(span['version'])!r}"
            )
        labels += [label] * (span["end"] - span["start"])
    if len(labels) != tokens:
        raise ValueError(f"labels of {len(labels)} tokens for {tokens}")
    return tuple(labels)


def _top_tokens(lists: Sequence[Sequence[Mapping[str, Any]]], number: int) -> dict[str, Tensor]:
    """Return the likeliest tokens before each token; vLLM replaces the last of them by a sampled one that is rarer."""
    shape = len(lists), number
    ids = torch.tensor([entry["token_id"] for entries in lists for entry in entries], dtype=torch.int32)
    logprobs = torch.tensor([entry["logprob"] for entries in lists for entry in entries], dtype=torch.float32)
    return {TOP_IDS: ids.view(shape), TOP_LOGPROBS: logprobs.view(shape)}


def _logprobs(values: Sequence[float]) -> Tensor:
    logprobs = torch.tensor(values, dtype=torch.float32)
    if not bool((logprobs > NO_LOGPROB).all()):  # also for NaN
        raise ValueError("a log-probability that is not finite")
    return logprobs
