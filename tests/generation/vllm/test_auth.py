"""RequireKey in front of an application that answers everything."""

import asyncio
from typing import Any

import pytest

from lightning_rl.generation.vllm.auth import RequireKey

SECRET = "the-key-of-the-server"
PATHS = ["/health", "/collective_rpc", "/update_weights", "/v1/models", "/a-path-of-a-later-release", "//health"]
WRONG = [b"", b"Bearer", b"Bearer another-key", f"Bearer {SECRET}x".encode(), SECRET.encode(), b"Bearer \xff\x00"]


class Application:
    """Answers 200, and remembers the calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One call, whose body is not read."""
        del receive
        self.asked.append(scope["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.fixture
def application(monkeypatch: pytest.MonkeyPatch) -> Application:
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    return Application()


def ask(application: Any, key: bytes | None = None, path: str = "/health", kind: str = "http") -> list[Any]:
    """The messages that are sent back."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the body of a refused call is not read")

    headers = [] if key is None else [(b"authorization", key)]
    asyncio.run(application({"type": kind, "path": path, "method": "GET", "headers": headers}, receive, send))
    return sent


@pytest.mark.parametrize("path", PATHS)
def test_every_path_is_closed_without_the_key_and_open_with_it(path: str, application: Application) -> None:
    guarded = RequireKey(application)
    assert [ask(guarded, key, path)[0]["status"] for key in (None, *WRONG)] == [401] * 7
    assert application.asked == []
    assert ask(guarded, f"Bearer {SECRET}".encode(), path)[0]["status"] == 200


def test_a_websocket_is_closed_before_it_opens_and_the_lifespan_needs_no_key(application: Application) -> None:
    guarded = RequireKey(application)
    assert ask(guarded, kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    assert ask(guarded, kind="lifespan")[0]["status"] == 200 and application.asked == ["lifespan"]
