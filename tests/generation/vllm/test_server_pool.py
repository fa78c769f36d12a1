"""The pool and its calls: backoff, balance, answers that no server should give, calls that are cut short."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kit.scripted_server import KEY, ScriptedServer, servers
from kit.support import tiny_policy

from lightning_rl import EngineError
from lightning_rl.generation.vllm import server_pool
from lightning_rl.generation.vllm.http import LOOP, Cancelled, Client, Unanswered
from lightning_rl.generation.vllm.scheduler import Places, Seat, Server
from lightning_rl.generation.vllm.server_client import Endpoint, Label
from lightning_rl.generation.vllm.server_pool import ServerPool
from lightning_rl.generation.vllm.weight_push import WeightPush


def a_push() -> WeightPush:
    return WeightPush("run", Path("unused"), writes=False, model=tiny_policy(), tokenizer=None, canary=None)


def a_pool(patience: float = 0.1) -> ServerPool:
    endpoints = [Endpoint(url, None, 5) for url in ("http://127.0.0.1:9", "http://127.0.0.1:10")]
    return ServerPool(endpoints, a_push(), patience=patience)


def a_server(port: int) -> Server:
    return Server(Endpoint(f"http://127.0.0.1:{port}", None, 5), ready=True)


def test_ranks_with_few_requests_each_ask_all_servers_between_them() -> None:
    asked = Counter[str]()
    for rank in range(16):
        places = Places([a_server(port) for port in range(10, 26)], at_once=256, rank=rank)
        asked.update(LOOP.run(places.take(10, Seat())).endpoint.url for _ in range(8))
    assert len(asked) == 16 and set(asked.values()) == {8}


def test_pauses_double_up_to_a_bound_and_begin_anew_after_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool.time, "monotonic", lambda: 100.0)
    lost = a_pool()
    server = lost.servers[0]
    pauses = []
    for _ in range(8):
        lost.remove(server, Unanswered("gone"))
        pauses.append(server.due - 100)
    assert pauses == [0.25, 0.5, 1, 2, 4, 8, 10, 10]
    lost.reset_losses(server)
    assert server.losses == 8, "an answer to a request from before does not count"
    lost.restore(server)
    lost.reset_losses(server)
    assert server.losses == 0


def test_a_server_that_is_lost_for_days_is_still_asked_again() -> None:
    lost = a_pool()
    server = lost.servers[0]
    for _ in range(5000):
        lost.remove(server, Unanswered("gone"))
    assert server.losses == 5000 and 0 < server.due - time.monotonic() <= 10


@pytest.mark.parametrize(
    "health",
    [
        pytest.param(401, id="another-key"),
        pytest.param(404, id="another-server"),
        pytest.param(418, id="a-proxy"),
        pytest.param(302, id="redirection"),
        pytest.param(b"[" * 10**5, id="deep"),
    ],
)
def test_a_watcher_outlives_whatever_a_health_check_says(
    health: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_pool, "POLL", 0.01)
    monkeypatch.setattr(server_pool, "BACKOFF", 0.01)
    server = ScriptedServer(architecture="Qwen2ForCausalLM")
    honest, odd = server.answer, threading.Event()
    server.answer = lambda path, body: health if odd.is_set() and path == "/health" else honest(path, body)  # pyright: ignore[reportAttributeAccessIssue]
    with servers(server):
        watched = ServerPool([Endpoint(server.url, KEY, 5)], a_push(), patience=20)
        try:
            assert watched.refresh() == []
            watched.watch()
            odd.set()
            wait_until(lambda: not watched.ready())
            asked = server.calls.count("/health")
            server.until(lambda known: known.calls.count("/health") > asked + 3)
            odd.clear()
            watched.wait()
        finally:
            watched.close()
    assert f"{server.url} is back, with the current weights" in [record.message for record in caplog.records]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"


def test_the_fewest_outstanding_tokens_come_next() -> None:
    first, second = a_server(9), a_server(10)
    places = Places([first, second], at_once=256)
    taken = [LOOP.run(places.take(tokens, Seat())) for tokens in (30, 10, 15, 1)]
    assert taken == [first, second, second, second]
    for server, tokens in zip(taken, (30, 10, 15, 1), strict=True):
        places.release(server, tokens)
    assert first.outstanding == second.outstanding == first.in_flight == second.in_flight == 0


def test_nobody_waits_longer_than_the_patience_and_the_reasons_are_told() -> None:
    empty = a_pool()
    empty.remove(empty.servers[1], Unanswered("it caught fire"))
    with pytest.raises(EngineError, match=r"127.0.0.1:9: not contacted yet; http://127.0.0.1:10: it caught fire\)"):
        empty.wait()


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_who_waits_for_a_server_can_be_cut_short(how: str) -> None:
    empty, ended = a_pool(patience=60), list[type]()

    async def draw(number: int) -> None:
        if number == 1:
            if how == "closed":
                await asyncio.to_thread(empty.close)
            raise ValueError("as expected")
        try:
            await empty.ask([1], {"max_tokens": 1}, name="one", oldest=0)
        except BaseException as error:
            ended.append(type(error))
            raise

    with pytest.raises((ValueError, Cancelled)):
        empty.run(draw, [0, 1])
    assert ended == [Cancelled if how == "closed" else asyncio.CancelledError]


def test_an_unexpected_answer_counts_as_none_and_a_refusal_is_an_error() -> None:
    answers: dict[str, Any] = {"/version": b"{", "/weight_info": {"weight_version": "a/b/c"}, "/health": 418}
    server = ScriptedServer()
    honest = server.answer
    server.answer = lambda path, body: answers.get(path, honest(path, body))  # pyright: ignore[reportAttributeAccessIssue]
    with servers(server), closing(Endpoint(server.url, KEY, 5)) as endpoint:
        with pytest.raises(Unanswered, match=r"expected JSON from http://.*/version, got {"):
            endpoint.describe()
        with pytest.raises(ValueError, match=r"expected http://.*/health to accept the call, got status 418: refused"):
            endpoint.check_health()
        answers["/version"] = {"release": 1}
        with pytest.raises(
            Unanswered, match=r"expected an answer from http://.* that vLLM gives, got KeyError: 'version'"
        ):
            endpoint.describe()
        assert endpoint.label() is None


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://", "https:/x"])
def test_a_url_is_checked_at_construction(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected a URL such as http://127.0.0.1:8000, got"):
        Client(url)


@pytest.mark.parametrize("text", ["default", "loading", "a/b/c", "a/1", "", "a/1/2/3"])
def test_a_label_that_no_trainer_gave_is_none(text: str) -> None:
    assert Label.read(text) is None
    assert Label.read(str(Label("ab12", 3, 7))) == Label("ab12", 3, 7)


def test_aborted_calls_count_as_unanswered_and_cancelled_ones_do_not() -> None:
    gate, said = threading.Event(), list[type]()
    server = ScriptedServer(lambda *_: 500 if gate.wait(20) else 408)
    with servers(server):
        client = Client(server.url, KEY)

        def call() -> None:
            body = {"sampling_params": {"max_tokens": 1}, "token_ids": [1]}
            try:
                client.call("POST", "/inference/v1/generate", body, timeout=20)
            except (Unanswered, Cancelled) as error:
                said.append(type(error))

        for end in (client.abort, client.close):
            asking = threading.Thread(target=call)
            asking.start()
            server.until(lambda known: len(known.requests) == len(said) + 1)
            end()
            asking.join()
        gate.set()
    assert said == [Unanswered, Cancelled]
