"""Pool of servers: backoff, patience, unusable answers and cancelled calls."""

import asyncio
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kit.marks import wait_for
from kit.scripted_server import KEY, ScriptedServer, servers
from kit.support import tiny_policy

from lightning_rl import EngineError
from lightning_rl.generation.vllm.server_client import ServerClient
from lightning_rl.generation.vllm.server_pool import ServerPool
from lightning_rl.generation.vllm.weight_push import WeightPush
from lightning_rl.utils.http import Cancelled, Unanswered


def a_push() -> WeightPush:
    return WeightPush("run", Path("unused"), writes=False, model=tiny_policy(), tokenizer=None, canary=None)


def a_pool(patience: float = 0.1) -> ServerPool:
    clients = [ServerClient(url, None, 5) for url in ("http://127.0.0.1:9", "http://127.0.0.1:10")]
    return ServerPool(clients, a_push(), patience=patience)


def test_a_server_whose_health_check_is_refused_is_lost_until_it_passes(caplog: pytest.LogCaptureFixture) -> None:
    server = ScriptedServer(architecture="Qwen2ForCausalLM")
    honest, odd = server.answer, threading.Event()
    server.answer = lambda path, body: 401 if odd.is_set() and path == "/health" else honest(path, body)
    with servers(server):
        watched = ServerPool([ServerClient(server.url, KEY, 5)], a_push(), patience=20)
        try:
            assert watched.refresh() == []
            watched.watch(watched.servers)
            odd.set()
            assert wait_for(lambda: not watched.ready())
            asked = server.calls.count("/health")
            server.until(lambda known: known.calls.count("/health") > asked + 3)
            odd.clear()
            watched.wait()
        finally:
            watched.close()
    assert f"{server.url} is back, with the current weights" in [record.message for record in caplog.records]


def test_a_wait_ends_after_the_patience_with_the_reason_of_each_server() -> None:
    empty = a_pool()
    empty.remove(empty.servers[1], Unanswered("it caught fire"))
    with pytest.raises(EngineError, match=r"127.0.0.1:9: not contacted yet; http://127.0.0.1:10: it caught fire\)"):
        empty.wait()


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_a_request_that_waits_for_a_server_can_be_cancelled(how: str) -> None:
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
    server.answer = lambda path, body: answers.get(path, honest(path, body))
    with servers(server), closing(ServerClient(server.url, KEY, 5)) as client:
        with pytest.raises(Unanswered, match=r"expected JSON from http://.*/version, got {"):
            client.describe()
        with pytest.raises(ValueError, match=r"expected http://.*/health to accept the call, got status 418: refused"):
            client.check_health()
        answers["/version"] = {"release": 1}
        with pytest.raises(
            Unanswered, match=r"expected an answer from http://.* that vLLM gives, got KeyError: 'version'"
        ):
            client.describe()
        assert client.label() is None
