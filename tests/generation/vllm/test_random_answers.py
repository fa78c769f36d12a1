"""Servers that answer anything at all: a call raises the engine's own errors alone, and no sample is unsound."""

import copy
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kit.engine_requests import launch, request_of
from kit.raw_server import RawServer, raw_server, whole
from kit.scripted_server import HOLDS, KEY, VOCABULARY, Answer, ScriptedServer, servers
from kit.support import tiny_model

from lightning_rl import EngineError, VLLMServerEngine
from lightning_rl.generation.vllm import server_pool
from lightning_rl.generation.vllm.http import Refused, Unanswered
from lightning_rl.generation.vllm.server_client import Endpoint, Label
from lightning_rl.generation.vllm.vllm_sampling import SCORING

HEALTHY: dict[str, Any] = {
    "version": "0.32.0",
    "weight_version": "run/0/0",
    "world_size": 1,
    "success": True,
    "prompt": "a text",
    "results": [HOLDS],
    "choices": [
        {
            "token_ids": [3, 4],
            "finish_reason": "length",
            "stop_reason": None,
            "logprobs": {"content": [{"token_id": 3, "logprob": -1.5}, {"token_id": 4, "logprob": -0.5}]},
            "weight_versions": [{"version": "run/0/0", "start": 0, "end": 2}],
        }
    ],
    "prompt_logprobs": [None, {"6": {"logprob": -2.0}}],
    "usage": {"prompt_tokens_details": {"cached_tokens": 0}},
}
DRAWING = {"max_tokens": 2, "logprobs": 0, "stop_token_ids": [1], "stop": None}
CALLS = {
    "health": lambda endpoint: endpoint.check_health(),
    "describe": lambda endpoint: endpoint.describe(),
    "detokenize": lambda endpoint: endpoint.detokenize([1, 2]),
    "compare": lambda endpoint: endpoint.compare([("w", (2, 3))]),
    "label": lambda endpoint: endpoint.label(),
    "load": lambda endpoint: endpoint.load(Path("nowhere"), Label("run", 0, 0)),
    "sample": lambda endpoint: endpoint.sample("name", [5, 6], DRAWING),
    "score": lambda endpoint: endpoint.sample("name", [5, 6], SCORING),
}
numbers = st.one_of(
    st.integers(-5, 20),
    st.sampled_from([2**31, 2**63, 2**64, 10**30, 10**310, -(10**310), 10**4000]),
    st.floats(),
    st.sampled_from([1e39, -1e39, 1e300, -9999.0]),
)
values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), numbers, st.text(max_size=8), st.sampled_from(["stop", "abort", "run/9/9", "2"])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something can be changed."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


@st.composite
def damaged(draw: st.DrawFn, healthy: Any = HEALTHY) -> bytes:
    """A healthy answer in which something was replaced, left out or doubled."""
    answer = copy.deepcopy(healthy)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(sorted(places(answer), key=repr)))
        holder = answer
        for key in path[:-1]:
            holder = holder[key]
        how = draw(st.sampled_from(["replace", "remove", "double"]))
        if how == "replace":
            holder[path[-1]] = draw(values)
        elif how == "remove" or not isinstance(holder, list):
            del holder[path[-1]]
        else:
            holder.append(copy.deepcopy(holder[path[-1]]))
        if not list(places(answer)):
            break
    return json.dumps(answer).encode()


bodies = st.one_of(
    damaged(),
    values.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=60),
    st.integers(1, 10**5).map(lambda depth: b'{"results":' * (depth % 3) + b"[" * depth),
    st.sampled_from([b"1e999", b"NaN", b"[1e400]", b'{"choices":[1e999]}', b"", b"null"]),
)
statuses = st.sampled_from([200] * 12 + [100, 201, 204, 301, 304, 400, 401, 408, 422, 429, 500, 503, 600, 999])
answers = st.one_of(
    st.builds(whole, statuses, bodies),
    st.builds(whole, st.just(200), bodies).flatmap(lambda data: st.integers(0, len(data)).map(lambda end: data[:end])),
    st.builds(lambda head, body: b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + body, st.binary(max_size=40), bodies),
    st.builds(
        lambda sizes, body: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + sizes + b"\r\n" + body,
        st.sampled_from([b"2", b"-1", b"fffffffff", b"0", b"x", b""]),
        bodies,
    ),
    st.binary(max_size=200),
)


class AnyServer:
    """Sends the same bytes to whoever asks."""

    def __init__(self) -> None:
        self.answer = b""

    def __call__(self, server: RawServer, connection: socket.socket, path: str) -> None:
        """One call, whatever the path."""
        del path
        server.send(connection, self.answer)


def check_call(name: str, endpoint: Endpoint) -> None:
    """Makes a call; what it may raise, a pool takes for a lost server or tells at the start."""
    kinds: set[type[Exception]] = {Unanswered, Refused}
    if name in ("describe", "compare"):
        kinds.add(ValueError)  # another release, model or way to start than the run needs
    if name == "load":
        kinds.add(RuntimeError)  # what the server says about the load
    message = ""
    try:
        answer = CALLS[name](endpoint)
    except Exception as error:
        if type(error) not in kinds:  # not of a subclass either, such as UnicodeDecodeError
            raise
        answer, message = None, str(error)
    assert len(message) < 1000 and message.isprintable(), "it goes to a terminal and to logs"
    if answer is not None and name in ("sample", "score"):
        check_sample(answer, DRAWING if name == "sample" else SCORING)


def check_sample(sample: Any, parameters: dict[str, Any]) -> None:
    """What is believed is sound."""
    assert len(sample.labels) == len(sample.token_ids) <= parameters["max_tokens"]
    assert all(type(token) is int and 0 <= token < 2**31 for token in sample.token_ids)
    for logprobs in (sample.logprobs, sample.prompt_logprobs):
        assert logprobs is None or (logprobs.isfinite().all() and (logprobs <= 1e-3).all())
    assert all(type(label) is Label for label in sample.labels) and sample.finish_reason in ("stop", "length", "abort")


@pytest.fixture(scope="module")
def odd() -> Iterator[tuple[AnyServer, Endpoint]]:
    script = AnyServer()
    with raw_server(script) as server, closing(Endpoint(server.url, KEY, 5)) as endpoint:
        yield script, endpoint


def any_call(odd: tuple[AnyServer, Endpoint], name: str, answer: bytes) -> None:
    script, endpoint = odd
    script.answer = answer
    check_call(name, endpoint)


free = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
names = st.sampled_from(sorted(CALLS))


@settings(max_examples=200, **free)
@given(names, answers)
def test_no_answer_raises_anything_but_our_own_errors(
    odd: tuple[AnyServer, Endpoint], name: str, answer: bytes
) -> None:
    any_call(odd, name, answer)


@pytest.mark.long
@settings(max_examples=10_000, **free)
@given(names, answers)
def test_ten_thousand_answers_raise_nothing_but_our_own_errors(
    odd: tuple[AnyServer, Endpoint], name: str, answer: bytes
) -> None:
    any_call(odd, name, answer)


@settings(max_examples=100, **free)
@given(st.sampled_from(["sample", "score"]), damaged())
@example("score", json.dumps({**HEALTHY, "choices": [{**HEALTHY["choices"][0], "token_ids": [3]}]}).encode())
def test_an_answer_that_is_damaged_somewhere_is_sound_or_counts_as_none(
    odd: tuple[AnyServer, Endpoint], name: str, answer: bytes
) -> None:
    any_call(odd, name, whole(body=answer))


def test_the_healthy_answer_is_one(odd: tuple[AnyServer, Endpoint]) -> None:
    script, endpoint = odd
    script.answer = whole(body=json.dumps(HEALTHY).encode())
    sample = endpoint.sample("name", [5, 6], DRAWING)
    assert (sample.token_ids, sample.labels, sample.cached) == ((3, 4), (Label("run", 0, 0),) * 2, 0)
    assert endpoint.describe().architecture == HOLDS["architecture"] and endpoint.label() == Label("run", 0, 0)


def test_an_engine_beside_such_a_server_draws_sound_samples_or_ends_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_pool, "POLL", 0.01)
    monkeypatch.setattr(server_pool, "BACKOFF", 0.001)
    monkeypatch.setattr(server_pool, "MAX_BACKOFF", 0.002)
    said: list[bytes] = []

    def script(body: dict[str, Any], answer: Answer) -> Answer:
        return said[0].replace(b"run/0/0", broken.label.encode()) if said else answer

    broken, sound, model = ScriptedServer(script), ScriptedServer(), tiny_model("llama", dtype=torch.float32)
    with servers(broken, sound):
        engine = VLLMServerEngine([broken.url, sound.url], api_key=KEY, canary=False, patience=10, timeout=10)
        launch(engine, model)
        engine.expect(model.named_parameters())
        engine.load_weights(model.named_parameters(), 0)

        @settings(max_examples=50, **free)
        @given(bodies)
        def check(body: bytes) -> None:
            said[:] = [body]
            try:
                (completion,) = engine.generate([request_of((2, 3), 100, 0, max_new_tokens=4)], logprobs=True)
            except EngineError:
                return
            assert 1 <= len(completion.token_ids) <= 4 and completion.version == 0
            assert all(0 <= token < VOCABULARY for token in completion.token_ids)
            assert completion.logprobs is not None and completion.logprobs.isfinite().all()

        check()
        said.clear()
        assert engine.generate([request_of((2, 3), 100, 0, max_new_tokens=4)])[0].token_ids == (0, 1, 2, 3)
        engine.close()
