"""Fleet without ready servers: backoff, patience, unusable answers, and calls that are cancelled or interrupted."""

import asyncio
import signal
import threading
from contextlib import closing
from typing import Any

import pytest
from generation.vllm.served_engines import a_fleet, an_engine, push
from kit.marks import wait_for
from kit.scripted_server import KEY, Answer, ScriptedServer, servers

from lightning_rl import EngineError
from lightning_rl.generation.vllm.fleet import ServerRequest
from lightning_rl.generation.vllm.server_client import ServerClient
from lightning_rl.utils.event_loop import REQUESTS, run_all
from lightning_rl.utils.http import Cancelled, Unanswered


def test_a_server_whose_health_check_is_refused_is_lost_until_it_passes(caplog: pytest.LogCaptureFixture) -> None:
    server = ScriptedServer(architecture="Qwen2ForCausalLM")
    honest, odd = server.answer, threading.Event()
    server.answer = lambda path, body: 401 if odd.is_set() and path == "/health" else honest(path, body)
    with servers(server):
        watched = a_fleet(server.url, rank=1, patience=20)
        try:
            watched.start()
            odd.set()
            assert wait_for(lambda: not watched.ready())
            asked = server.calls.count("/health")
            server.until(lambda known: known.calls.count("/health") > asked + 3)
            odd.clear()
            REQUESTS.run(watched.wait())
        finally:
            watched.close()
    assert f"{server.url} is back, with the current weights" in [record.message for record in caplog.records]


def test_a_wait_ends_after_the_patience_with_the_reason_of_each_server() -> None:
    empty = a_fleet(patience=0.1)

    async def wait() -> None:
        empty.remove(empty.servers[1], Unanswered("it caught fire"))
        await empty.wait()

    with pytest.raises(EngineError, match=r"127.0.0.1:9: not contacted yet; http://127.0.0.1:10: it caught fire\)"):
        REQUESTS.run(wait())


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_a_request_that_waits_for_a_server_can_be_cancelled(how: str) -> None:
    empty, ended = a_fleet(patience=60), list[type]()

    async def draw(number: int) -> None:
        if number == 1:
            if how == "closed":
                await asyncio.to_thread(empty.close)
            raise ValueError("as expected")
        try:
            await empty.complete(ServerRequest("one", [1], {"max_tokens": 1}, 0))
        except BaseException as error:
            ended.append(type(error))
            raise

    with pytest.raises((ValueError, Cancelled)):
        REQUESTS.run(run_all(map(draw, [0, 1])))
    assert ended == [Cancelled if how == "closed" else asyncio.CancelledError]


def test_a_push_that_is_interrupted_resumes_the_requests_of_its_server(one: ScriptedServer) -> None:
    engine, honest, gate = an_engine(one), one.answer, threading.Event()

    def answer(path: str, body: Any) -> Answer:
        if path == "/collective_rpc" and body["method"] == "lightning_rl_load":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return 500 if gate.wait(20) else 501
        return honest(path, body)

    one.answer = answer
    with pytest.raises(KeyboardInterrupt):
        push(engine, 1)
    engine.close()
    assert one.calls.count("/resume") == one.calls.count("/pause?mode=keep&clear_cache=false") == 2
    assert one.label == "loading", "no trainer accepts tokens of a mixture"
    gate.set()


def test_an_unexpected_answer_counts_as_none_and_a_refusal_is_an_error() -> None:
    answers: dict[str, Any] = {"/version": b"{", "/weight_info": {"weight_version": "a/b/c"}, "/health": 418}
    server = ScriptedServer()
    honest = server.answer
    server.answer = lambda path, body: answers.get(path, honest(path, body))
    with servers(server), closing(ServerClient(server.url, KEY, 5)) as client:
        with pytest.raises(Unanswered, match=r"expected JSON from http://.*/version, got {"):
            REQUESTS.run(client.describe())
        with pytest.raises(ValueError, match=r"expected http://.*/health to accept the call, got status 418: refused"):
            REQUESTS.run(client.check_health())
        answers["/version"] = {"release": 1}
        with pytest.raises(
            Unanswered, match=r"expected an answer from http://.* that vLLM gives, got KeyError: 'version'"
        ):
            REQUESTS.run(client.describe())
        assert REQUESTS.run(client.label()) is None
