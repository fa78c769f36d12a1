"""CompletionServer of programs: loopback, a secret, one question at a time, and an orderly end."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kit.programs import post

from lightning_rl import FinishReason
from lightning_rl.environments.adapters import completion_server
from lightning_rl.environments.adapters.completion_server import CompletionServer, Line, Question
from lightning_rl.processes.errors import CallError


@pytest.fixture
def endpoint() -> Iterator[CompletionServer]:
    made = CompletionServer()
    yield made
    made.close()


@pytest.fixture
def line(endpoint: CompletionServer) -> Line:
    made = Line(10.0)
    endpoint.connect("one", made)
    return made


def question_of(line: Line) -> Question:
    question = line.wait()
    assert question is not None
    return question


BODY = {"model": "policy", "token_ids": [3, 1, 4], "sampling_params": {"stop_token_ids": [9], "logprobs": 1}}


@pytest.mark.parametrize(("finish", "reason"), [(FinishReason.STOP, "stop"), (FinishReason.LENGTH, "length")])
def test_an_answer_goes_back_as_a_server_of_vllm_gives_it(
    endpoint: CompletionServer, line: Line, finish: FinishReason, reason: str
) -> None:
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(post, endpoint, BODY)
        question = question_of(line)
        assert (question.token_ids, question.session, question.stop_token_ids) == ((3, 1, 4), "one", frozenset({9}))
        question.answer((5, 9), finish)
        status, body = asked.result()
    assert status == 200
    content = [{"token": "token_id:5", "logprob": 0.0}, {"token": "token_id:9", "logprob": 0.0}]
    assert body["choices"] == [
        {"index": 0, "token_ids": [5, 9], "logprobs": {"content": content}, "finish_reason": reason}
    ]


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"secret": ""}, 401),
        ({"secret": "another"}, 401),
        ({"session": "two"}, 404),
        ({"path": "/v1/models", "method": "GET"}, 404),
        ({"path": "/v1/chat/completions"}, 404),
    ],
)
def test_strangers_reach_no_conversation(
    endpoint: CompletionServer, line: Line, options: dict[str, Any], status: int
) -> None:
    assert post(endpoint, BODY, **options)[0] == status
    line.end()
    assert line.wait() is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{", "a JSON object with token_ids and sampling_params, got JSONDecodeError"),
        ([], "a JSON object with token_ids and sampling_params, got TypeError"),
        ({"sampling_params": {}}, "a JSON object with token_ids and sampling_params, got KeyError: 'token_ids'"),
        ({**BODY, "token_ids": []}, r"token_ids to be a list of integers, got \[\]"),
        ({**BODY, "token_ids": [1, True]}, r"token_ids to be a list of integers, got \[1, True\]"),
        ({**BODY, "token_ids": [1.0]}, r"token_ids to be a list of integers, got \[1.0\]"),
        ({**BODY, "features": {}}, "a request for text alone, got features"),
        ({**BODY, "sampling_params": {"temperature": 0, "n": 2}}, "leaves sampling to the run, got n, temperature"),
    ],
)
def test_what_no_row_can_hold_ends_the_conversation_with_its_reason(
    endpoint: CompletionServer, line: Line, body: Any, expected: str
) -> None:
    status, reply = post(endpoint, body)
    assert status == 400 and reply["error"]["message"].startswith("expected ")
    with pytest.raises(ValueError, match=f"^expected .*{expected}"):
        line.wait()


def test_a_second_question_before_the_answer_to_the_first_ends_the_conversation(
    endpoint: CompletionServer, line: Line
) -> None:
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(post, endpoint, BODY)
        question = question_of(line)
        assert post(endpoint, BODY)[0] == 400
        question.answer((9,), FinishReason.STOP)
        assert asked.result()[0] == 200
    with pytest.raises(ValueError, match="one request at a time, got a second one before the first was answered"):
        line.wait()


def test_nothing_is_left_of_one_that_is_closed_and_whoever_waits_is_told() -> None:
    CompletionServer().close()  # starts the thread of all endpoints
    before = threading.active_count()
    endpoint, line = CompletionServer(), Line(10.0)
    endpoint.connect("one", line)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(post, endpoint, BODY)
        question_of(line)
        endpoint.close()
        status, body = asked.result()
    assert (status, body["error"]["message"]) == (410, "the conversation has ended")
    with pytest.raises(ConnectionRefusedError):
        post(endpoint, BODY)
    assert threading.active_count() == before


def test_the_time_of_a_conversation_is_that_of_its_program() -> None:
    line = Line(0.2)
    begin = time.monotonic()
    with pytest.raises(CallError, match=r"timeout: the program took longer than 0.2 s"):
        line.wait()
    assert 0.2 <= time.monotonic() - begin < 5 and not line.ended.is_set()


@pytest.mark.parametrize(
    ("part", "reply"),
    [("", b""), ("Authorization: Bearer x\r\n", b""), ("Content-Length: 9\r\n\r\n{", b"HTTP/1.1 408 ")],
    ids=["nothing", "headers", "body"],
)
def test_a_client_that_sends_half_a_request_is_disconnected(
    part: str, reply: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion_server, "REQUEST_SECONDS", 0.2)
    server = CompletionServer()
    server.connect("one", Line(10.0))
    head = f"POST {completion_server.ROUTE} HTTP/1.1\r\nHost: x\r\nX-Session-ID: one\r\n"
    secret = f"Authorization: Bearer {server.secret}\r\n" if reply else ""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30) as client:
        client.sendall(f"{head}{secret}{part}".encode() if part else b"")
        assert b"".join(iter(lambda: client.recv(4096), b"")).startswith(reply)
    server.close()
