"""One vLLM server as a trainer calls it: what it is, weights in, samples out, and whose weights each token is from."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rl.generation.vllm.http import Calls, Client, Unanswered
from lightning_rl.generation.vllm.versions import check_version
from lightning_rl.generation.vllm.worker import Description
from lightning_rl.generation.weights.stream import Shape

PROBE = 30.0  # seconds for a call that no work of the server delays
LOADING = "loading"  # in place of a label, until the weights are whole
NO_LOGPROB = -9999.0  # what vLLM sends for one that is -inf or NaN
REQUIRED = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}


class Label(NamedTuple):
    """What a server puts on each token: the weights that it was drawn from."""

    run: str  # that pushed them, by a random name
    number: int  # of the push in this run; a later one has a larger number, whatever its version
    version: int

    def __str__(self) -> str:
        """As a server keeps it."""
        return f"{self.run}/{self.number}/{self.version}"

    @staticmethod
    def read(text: str) -> "Label | None":
        """The inverse of ``str``; None for the label of a server that got its weights from nobody, or half of them."""
        match = re.fullmatch(r"(\w+)/(\d+)/(\d+)", text)
        return None if match is None else Label(match[1], int(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a server answered to one request."""

    token_ids: tuple[int, ...]
    logprobs: Tensor | None  # float32; None if not asked for
    prompt_logprobs: Tensor | None  # of each token of the prompt but the first; None if not asked for
    finish_reason: str  # in vLLM's words
    stop_reason: str | int | None  # the string or id that ended it
    labels: tuple[Label, ...]  # of the weights that each token was drawn from
    cached: int  # tokens of the prompt that came out of the prefix cache


class Endpoint:
    """Calls one server, with ``timeout`` seconds for a response or a load. Every call may raise :class:`Unanswered`."""

    def __init__(self, url: str, key: str | None, timeout: float) -> None:
        self._client = Client(url, key)
        self.url = self._client.url
        self.timeout = timeout

    def abort(self) -> None:
        """Ends the calls in flight, because the server is gone."""
        self._client.calls.abort()

    def close(self) -> None:
        """Ends the calls in flight, and every later one."""
        self._client.calls.cancel()

    def check_health(self) -> None:
        """Returns if the server takes requests."""
        self._client.call("GET", "/health", timeout=PROBE)

    def describe(self) -> Description:
        """What the server holds.

        Raises:
            ValueError: if it was not started in the way that the engine needs.
        """
        answer = self._client.call("GET", "/version", timeout=PROBE)
        try:
            with self._parsing():
                check_version(str(answer["version"]))
        except ImportError as error:
            raise ValueError(f"{self.url}: {error}") from error
        results = self._on_workers("lightning_rl_describe")
        with self._parsing():
            description = Description(**results[0])
        for name, value in REQUIRED.items():
            if (got := getattr(description, name)) != value:
                raise ValueError(f"expected {name} {value} at {self.url}, got {got}: use lightning-rl serve")
        return description

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of some tokens, by the server's tokenizer."""
        answer = self._post("/detokenize", {"tokens": list(ids)})
        with self._parsing():
            return str(answer["prompt"])

    def compare(self, sent: Sequence[tuple[str, Shape]]) -> None:
        """Compares names and shapes that syncs will bring with the server's own.

        Raises:
            ValueError: naming the first tensor that differs.
        """
        for result in self._on_workers("lightning_rl_compare", [(name, list(shape)) for name, shape in sent]):
            if "error" in result:
                raise ValueError(f"{self.url}: {result['error']}")

    def label(self) -> Label | None:
        """Of the weights that the server holds; None if they came from nobody."""
        answer = self._client.call("GET", "/weight_info", timeout=self.timeout)
        with self._parsing():
            return Label.read(str(answer["weight_version"]))

    def load(self, folder: Path, label: Label) -> None:
        """Loads the weights of a folder. Requests in flight stand still meanwhile, and go on with the new ones.

        Until the load has succeeded the server's label is one that no trainer accepts.

        Raises:
            RuntimeError: if the server could not load them.
        """
        self._post("/pause?mode=keep&clear_cache=false")
        try:
            self.clear_label()
            for result in self._on_workers("lightning_rl_load", str(folder)):
                if "error" in result:
                    raise RuntimeError(f"expected {self.url} to load weights, but it said: {result['error']}")
            if not self._post("/reset_prefix_cache?reset_running_requests=true")["success"]:
                raise RuntimeError(f"expected {self.url} to drop its prefix cache, but it did not")
            self._post("/update_weight_version", {"new_version": str(label)})
        finally:
            self._post("/resume")

    def clear_label(self) -> None:
        """Takes the label off the weights that the server holds, so that nobody takes tokens from them."""
        self._post("/update_weight_version", {"new_version": LOADING})

    def sample(
        self, name: str, ids: Sequence[int], parameters: Mapping[str, Any], calls: Calls | None = None
    ) -> Sample:
        """One response to a request whose name is new to the server, under vLLM's sampling parameters.

        Raises:
            ValueError: if the server refuses the request.
        """
        body = {"request_id": name, "token_ids": list(ids), "sampling_params": dict(parameters)}
        answer = self._client.call("POST", "/inference/v1/generate", body, timeout=self.timeout, calls=calls)
        logprobs = prompt_logprobs = None
        with self._parsing():
            (choice,) = answer["choices"]
            tokens = tuple(map(int, choice["token_ids"]))
            if parameters.get("logprobs") is not None:
                content = choice["logprobs"]["content"]
                if tuple(entry["token_id"] for entry in content) != tokens:
                    raise ValueError("log-probabilities of other tokens")
                logprobs = _finite([entry["logprob"] for entry in content])
            if parameters.get("prompt_logprobs") is not None:
                entries = zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)
                prompt_logprobs = _finite([entry[str(token)]["logprob"] for token, entry in entries])
            return Sample(
                token_ids=tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                finish_reason=choice["finish_reason"],
                stop_reason=choice["stop_reason"],
                labels=_labels(choice, len(tokens)),
                cached=int(answer["usage"]["prompt_tokens_details"]["cached_tokens"]),
            )

    @contextmanager
    def _parsing(self) -> Iterator[None]:
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Unanswered(
                f"expected an answer from {self.url} that vLLM gives, got {type(error).__name__}: {error}"
            ) from error

    def _on_workers(self, method: str, *arguments: Any) -> list[Any]:
        answer = self._post("/collective_rpc", {"method": method, "args": arguments})
        with self._parsing():
            return answer["results"]

    def _post(self, path: str, body: Any = None) -> Any:
        return self._client.call("POST", path, body, timeout=self.timeout)


def _labels(choice: Any, tokens: int) -> tuple[Label, ...]:
    """Of each token; unanswered if nobody pushed the weights that one came from, as after a restart of the server."""
    labels: list[Label] = []
    for span in choice["weight_versions"] or []:
        label = Label.read(span["version"])
        if label is None:
            raise Unanswered(f"expected tokens of weights that a trainer pushed, got some of {span['version']!r}")
        labels += [label] * (span["end"] - span["start"])
    if len(labels) != tokens:
        raise ValueError(f"labels of {len(labels)} tokens for {tokens}")
    return tuple(labels)


def _finite(values: Sequence[float]) -> Tensor:
    logprobs = torch.tensor(values, dtype=torch.float32)
    if not bool((logprobs > NO_LOGPROB).all()):
        raise ValueError("a log-probability that is not finite")
    return logprobs
