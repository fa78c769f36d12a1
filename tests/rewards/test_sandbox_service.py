"""SandboxService with a scripted local server that is right, busy, broken, slow, or redirects."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rewards.endpoint import serving

from lightning_rl.rewards import CodeTests, SandboxService, SandboxUnavailable, sandbox_service


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_service, "DELAY", 0.01)


KEY = "a-key-of-the-service"
Script = Callable[[dict[str, Any]], tuple[int, Any]]


def ran(stdout: str = "", *, status: str = "Finished", code: int | None = 0, stderr: str = "") -> tuple[int, Any]:
    """Return the answer of the service for a program."""
    run = {"status": status, "execution_time": 0.1, "return_code": code, "stdout": stdout, "stderr": stderr}
    return 200, {"status": "Success" if code == 0 else "Failed", "message": "", "run_result": run, "files": {}}


def double(body: dict[str, Any]) -> tuple[int, Any]:
    """Stands for a service that runs programs: it knows one that prints 4 and one that doubles."""
    return ran("4\n") if body["code"] == "print(4)" else ran(f"{2 * int(body['stdin'] or 0)}\n")


@contextmanager
def service(script: Script) -> Iterator[tuple[str, list[Any]]]:
    """Return the URL, and body and headers of every request."""
    with serving(lambda body, _: script(body)) as endpoint:
        yield endpoint.url, endpoint.requests


RUN = ran("4\n")[1]["run_result"]


def answer_with(**changes: Any) -> tuple[int, Any]:
    return 200, {"status": "Success", "run_result": {**RUN, **changes}}


def answer_without(key: str) -> tuple[int, Any]:
    return 200, {"status": "Success", "run_result": {name: value for name, value in RUN.items() if name != key}}


def in_turn(*answers: tuple[int, Any]) -> Script:
    left = list(answers)
    return lambda _: left.pop(0)


def test_a_program_is_run_elsewhere_within_its_limits_and_behind_the_key_of_a_file(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(f"{KEY}\n")
    key.chmod(0o600)
    with service(lambda _: ran("6\n", code=3, stderr="why")) as (url, requests):
        sandbox = SandboxService(url=f"{url}/", key_file=key, seconds=2.5, memory=2**29)
        result = sandbox.run("print(2 * int(input()))", "3")
    assert (result.ending, result.code, result.stdout, result.stderr) == ("exited", 3, "6\n", "why") and not result.ok
    ((body, headers),) = requests
    assert headers["path"] == "/run_code" and headers["Authorization"] == f"Bearer {KEY}"
    assert body == {
        "code": "print(2 * int(input()))", "language": "python", "stdin": "3", "run_timeout": 2.5,
        "memory_limit_MB": 512,
    }  # fmt: skip
    assert KEY not in repr(sandbox)


@pytest.mark.parametrize(
    ("answer", "ending", "out"),
    [
        (ran("a", status="TimeLimitExceeded", code=None), "too long", "a"),
        (ran("x" * (SandboxService.output + 1)), "too much output", "x" * SandboxService.output),
        (answer_with(stdout=None, return_code=1), "exited", ""),
    ],
    ids=["slow", "wordy", "silent"],
)  # fmt: skip
def test_a_program_that_exceeds_a_limit_has_its_ending(answer: tuple[int, Any], ending: str, out: str) -> None:
    with service(lambda _: answer) as (url, _):
        result = SandboxService(url=url).run("...")
    assert (result.ending, result.stdout, result.ok) == (ending, out, False)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "busy",
    [(503, b"later"), (307, b""), (200, b"<html>"),
     (200, {"status": "SandboxError", "message": "no room", "run_result": None}),
     ran(status="Error", code=None), (200, {**ran("4\n")[1], "status": "SandboxError"})],
    ids=["503", "redirect", "page", "sandbox-error", "error", "sandbox-error-with-a-result"],
)  # fmt: skip
def test_a_busy_service_is_asked_again(busy: tuple[int, Any]) -> None:
    with service(in_turn(busy, busy, ran("4\n"))) as (url, requests):
        assert SandboxService(url=url, retries=2).run("print(4)").ok
    assert len(requests) == 3
    with service(in_turn(busy, busy)) as (url, requests), pytest.raises(SandboxUnavailable, match="/run_code"):
        SandboxService(url=url, retries=1).run("print(4)")
    assert len(requests) == 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((401, b"who are you"), "status 401: who are you"),
        ((200, {"status": "Success", "run_result": [1]}), "expected .* to return the result of a program"),
        (answer_without("stdout"), "expected .* to return the result of a program"),
    ],
    ids=["key", "list", "no-output"],
)
def test_an_error_that_would_repeat_is_raised_at_once(answer: tuple[int, Any], said: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    with service(lambda _: answer) as (url, requests), pytest.raises(SandboxUnavailable, match=said) as refused:
        SandboxService(url=url, key_file=key).run("print(4)")
    assert len(requests) == 1 and KEY not in str(refused.value)


def test_a_service_that_does_not_answer_in_time_raises() -> None:
    over = threading.Event()

    def hangs(_: dict[str, Any]) -> tuple[int, Any]:
        over.wait(30)
        return ran()

    with service(hangs) as (url, _):
        try:
            with pytest.raises(SandboxUnavailable, match=r"no answer from .*: TimeoutError"):
                SandboxService(url=url, seconds=0.2, patience=0.2, retries=0).run("print(4)")
        finally:
            over.set()
    with pytest.raises(SandboxUnavailable, match=r"no answer from .*: ClientConnectorError"):
        SandboxService(url=url, retries=0).run("print(4)")


def test_a_row_that_the_service_cannot_run_gets_no_reward() -> None:
    def loses(body: dict[str, Any]) -> tuple[int, Any]:
        return (503, b"full") if body["stdin"] == "3" else double(body)

    program = "```python\nprint(2 * int(input()))\n```"
    tests = [[{"input": "2", "output": "4"}], [{"input": "3", "output": "6"}], [{"input": "2", "output": "5"}]]
    with service(loses) as (url, _):
        reward = CodeTests(sandbox=SandboxService(url=url, retries=1))
        with pytest.warns(UserWarning, match="could not run the programs of 1 of 3 completions"):
            right, lost, wrong = reward([""] * 3, [program] * 3, tests=tests)
    assert (right, wrong) == (1.0, 0.0) and math.isnan(float(str(lost)))


def test_a_service_that_runs_no_program_is_refused_at_construction() -> None:
    with service(lambda _: ran("5\n")) as (url, _), pytest.raises(SandboxUnavailable, match="prints a digit"):
        CodeTests(sandbox=SandboxService(url=url))
