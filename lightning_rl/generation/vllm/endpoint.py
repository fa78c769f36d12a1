"""One vLLM server as a trainer calls it: what it is, weights in, samples out, and whose weights each token is from."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rl.generation.vllm.group import GroupError, Invitation
from lightning_rl.generation.vllm.http import LOOP, MAX_ANSWER, Client, Stale, Unanswered, quote
from lightning_rl.generation.vllm.sampling import FINISH
from lightning_rl.generation.vllm.versions import check_version
from lightning_rl.generation.vllm.worker import Description
from lightning_rl.generation.weights.buckets import Specification
from lightning_rl.generation.weights.stream import Shape

PROBE = 30.0  # seconds for a call that no work of the server delays
LEAVING = 5.0  # seconds for a server that nothing more is asked of
LOADING = "loading"  # in place of a label, until the weights are whole
NO_LOGPROB = -9999.0  # what vLLM sends for one that is -inf or NaN
ROUNDING = 1e-3  # that a log-probability may be above 0
TOKEN_BYTES = 2**10  # of an answer, at most, for each token of prompt and response
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
        match = re.fullmatch(r"(\w+)/([0-9]{1,9})/([0-9]{1,9})", text)
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
    """Calls one server, with ``timeout`` seconds for a response or a load.

    Every call may raise :class:`Unanswered`, whatever the server sends, or :class:`Refused`.
    """

    def __init__(self, url: str, key: str | None, timeout: float, ca: Path | None = None) -> None:
        self._client = Client(url, key, ca)
        self.url = self._client.url
        self.timeout = timeout

    def abort(self) -> None:
        """Ends the calls in flight, because the server is gone."""
        self._client.abort()

    def close(self) -> None:
        """Ends the calls in flight, and every later one."""
        self._client.close()

    def check_health(self) -> None:
        """Returns if the server takes requests."""
        self._client.call("GET", "/health", timeout=PROBE)

    def describe(self) -> Description:
        """What the server holds.

        Raises:
            ValueError: if it was not started in the way that the engine needs.
        """
        answer = self._get("/version")
        try:
            with self._parsing():
                check_version(str(answer["version"]))
        except ImportError as error:
            raise ValueError(f"{self.url}: {quote(str(error))}") from error
        self._check_single()
        results = self._on_workers("lightning_rl_describe")
        with self._parsing():
            description = _description(results[0])
        for name, value in REQUIRED.items():
            if (got := getattr(description, name)) != value:
                raise ValueError(f"expected {name} {value} at {self.url}, got {quote(got)}: use lightning-rl serve")
        return description

    def _check_single(self) -> None:
        """Refuses several engines behind one port.

        Loads go to all of them, but only the first one's answer comes back, so another one could serve old weights
        under the new label. A worker of a dense model does not know of the other engines; the whole server does.
        """
        sizes = [self._world_size(whole) for whole in ("true", "false")]
        if sizes[0] != sizes[1]:
            number = sizes[0] // max(sizes[1], 1)
            raise ValueError(
                f"expected one engine at {self.url}, got {number} (--data-parallel-size), of which only the first "
                "would say whether it loaded the weights: start a server for each, and pass all URLs"
            )

    def _world_size(self, include_dp: str) -> int:
        answer = self._get(f"/get_world_size?include_dp={include_dp}")
        with self._parsing():
            return _count(answer["world_size"])

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
                raise ValueError(f"{self.url}: {quote(str(result['error']))}")

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
        with self._replacing_weights(label):
            self._check_load(self._on_workers("lightning_rl_load", str(folder)))

    def receive(self, group: str, label: Label) -> None:
        """Loads the weights that are broadcast in a group, otherwise as :meth:`load` does.

        Raises:
            RuntimeError: if the server could not load them, though it read them to their end.
            GroupError: if it is no member any more.
        """
        with self._replacing_weights(label):
            results = self._on_workers("lightning_rl_receive", group)
            for result in results:
                if "left" in result:
                    raise GroupError(f"{self.url} left group {group}: {quote(str(result['left']))}")
            self._check_load(results)

    @contextmanager
    def _replacing_weights(self, label: Label) -> Iterator[None]:
        self._post("/pause?mode=keep&clear_cache=false")
        try:
            self.clear_label()
            yield
            answer = self._post("/reset_prefix_cache?reset_running_requests=true")
            with self._parsing():
                reset = answer["success"]
            if reset is not True:
                raise RuntimeError(f"expected {self.url} to drop its prefix cache, but it did not")
            self._post("/update_weight_version", {"new_version": str(label)})
        finally:
            self._post("/resume")

    def _check_load(self, results: Sequence[Mapping[str, Any]]) -> None:
        for result in results:
            if "error" in result:
                said = quote(str(result["error"]))
                raise RuntimeError(f"expected {self.url} to load weights, but it said: {said}")

    def count_workers(self) -> int:
        """How many processes hold a part of its weights."""
        return self._world_size("false")

    def gpus(self) -> list[str]:
        """The GPU of each of these processes."""
        results = self._on_workers("lightning_rl_gpu")
        with self._parsing():
            return [str(result["gpu"]) for result in results]

    def join(self, invitation: Invitation, first: int, tensors: Sequence[Specification]) -> None:
        """Has every worker join a group, as its members from ``first`` on.

        Raises:
            GroupError: if one could not.
        """
        for result in self._on_workers("lightning_rl_join", invitation, first, tensors):
            if "error" in result:
                raise GroupError(f"expected {self.url} to join a group, but it said: {quote(str(result['error']))}")

    def membership(self) -> str:
        """The name of the group that every worker is in; empty for none."""
        results = self._on_workers("lightning_rl_membership")
        with self._parsing():
            names = {str(result["name"]) for result in results}
        return names.pop() if len(names) == 1 else ""

    def leave(self) -> None:
        """Has every worker leave its group."""
        self._client.call("POST", "/collective_rpc", {"method": "lightning_rl_leave", "args": []}, timeout=LEAVING)

    def clear_label(self) -> None:
        """Takes the label off the weights that the server holds, so that nobody takes tokens from them."""
        self._post("/update_weight_version", {"new_version": LOADING})

    def sample(self, name: str, ids: Sequence[int], parameters: Mapping[str, Any]) -> Sample:
        """What :meth:`draw` returns, for a thread that waits for it."""
        return LOOP.run(self.draw(name, ids, parameters))

    async def draw(
        self, name: str, ids: Sequence[int], parameters: Mapping[str, Any], salt: str | None = None
    ) -> Sample:
        """One response to a request whose name is new to the server, under vLLM's sampling parameters.

        With a salt it shares the prefix cache with requests of the same salt alone.
        """
        body: dict[str, Any] = {"token_ids": list(ids), "sampling_params": dict(parameters)}
        if salt is not None:
            body["cache_salt"] = salt
        limit = MAX_ANSWER + TOKEN_BYTES * (len(ids) + parameters["max_tokens"])
        answer = await self._generate(name, body, limit)
        logprobs = prompt_logprobs = None
        with self._parsing():
            (choice,) = answer["choices"]
            tokens = _counts(choice["token_ids"])
            if len(tokens) > parameters["max_tokens"]:
                raise ValueError(f"{len(tokens)} tokens for at most {parameters['max_tokens']}")
            if parameters.get("logprobs") is not None:
                content = choice["logprobs"]["content"]
                if tuple([entry["token_id"] for entry in content]) != tokens:
                    raise ValueError("log-probabilities of other tokens")
                logprobs = _logprobs([entry["logprob"] for entry in content])
            if parameters.get("prompt_logprobs") is not None:
                entries = zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)
                prompt_logprobs = _logprobs([entry[str(token)]["logprob"] for token, entry in entries])
            _check_end(choice, tokens, parameters)
            return Sample(
                token_ids=tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                finish_reason=choice["finish_reason"],
                stop_reason=choice["stop_reason"],
                labels=_labels(choice, len(tokens)),
                cached=_count(answer["usage"]["prompt_tokens_details"]["cached_tokens"]),
            )

    async def _generate(self, name: str, body: Mapping[str, Any], limit: int) -> Any:
        """Asks again where a connection was stale, under a further name, since the server may have seen the first."""
        attempt = 0
        while True:
            named = {"request_id": f"{name}-{attempt}" if attempt else name, **body}
            try:
                return await self._client.request(
                    "POST", "/inference/v1/generate", named, timeout=self.timeout, limit=limit
                )
            except Stale:  # which is kept no more
                attempt += 1

    @contextmanager
    def _parsing(self) -> Iterator[None]:
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            what = quote(f"{type(error).__name__}: {error}")
            raise Unanswered(f"expected an answer from {self.url} that vLLM gives, got {what}") from error

    def _on_workers(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """What each worker of the server says."""
        answer = self._post("/collective_rpc", {"method": method, "args": arguments})
        with self._parsing():
            results = answer["results"]
            if not isinstance(results, list) or not results or not all(isinstance(one, dict) for one in results):
                raise ValueError("no answer of a worker")
            return results

    def _get(self, path: str) -> Any:
        return self._client.call("GET", path, timeout=PROBE)

    def _post(self, path: str, body: Any = None) -> Any:
        return self._client.call("POST", path, body, timeout=self.timeout)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"expected a count, got {value!r}")
    return value


def _counts(values: Sequence[Any]) -> tuple[int, ...]:
    """Counts, looked at all together, because an answer may have thousands."""
    if values and not (set(map(type, values)) == {int} and min(values) >= 0 and max(values) < 2**31):
        raise ValueError("expected counts, got something else")
    return tuple(values)


def _description(result: Mapping[str, Any]) -> Description:
    description = Description(**result)
    for name, kind in Description.__annotations__.items():
        if type(getattr(description, name)) is not kind:
            raise TypeError(f"expected {name} to be of type {kind.__name__}, got {getattr(description, name)!r}")
    for number in (description.vocabulary, description.max_length, description.block_size):
        _count(number)
    if not isinstance(getattr(torch, description.dtype, None), torch.dtype):
        raise ValueError(f"expected a dtype of torch, got {description.dtype}")
    return description


def _check_end(choice: Mapping[str, Any], tokens: Sequence[int], parameters: Mapping[str, Any]) -> None:
    """Refuses a reason that vLLM does not give, and a stop for something that the request did not name."""
    finish, stop = choice["finish_reason"], choice["stop_reason"]
    if finish not in FINISH:
        raise ValueError(f"the reason {finish!r} that a response ended, none of {', '.join(FINISH)}")
    if finish == "stop" and "stop_token_ids" in parameters:
        ends = bool(tokens) and tokens[-1] in parameters["stop_token_ids"]
        if not ends and stop not in (parameters["stop"] or ()):
            raise ValueError(f"a response that stopped for {stop!r} after {list(tokens[-1:])}")


def _labels(choice: Mapping[str, Any], tokens: int) -> tuple[Label, ...]:
    """Of each token; unanswered if nobody pushed the weights that one came from, as after a restart of the server."""
    labels: list[Label] = []
    for span in choice["weight_versions"] or []:
        label, start, end = Label.read(span["version"]), _count(span["start"]), _count(span["end"])
        if label is None:
            raise Unanswered(
                f"expected tokens of weights that a trainer pushed, got some of {quote(span['version'])!r}"
            )
        if start != len(labels) or not start <= end <= tokens:
            raise ValueError(f"a label for tokens {start} to {end} after that for {len(labels)} of {tokens}")
        labels += [label] * (end - start)
    if len(labels) != tokens:
        raise ValueError(f"labels of {len(labels)} tokens for {tokens}")
    return tuple(labels)


def _logprobs(values: Sequence[float]) -> Tensor:
    numbers = set(map(type, values)) <= {int, float}
    if values and not (numbers and min(values) > NO_LOGPROB and max(values) <= ROUNDING):  # JSON has no NaN
        raise ValueError("a log-probability that is not finite, or above 0")
    return torch.tensor(values, dtype=torch.float32)
