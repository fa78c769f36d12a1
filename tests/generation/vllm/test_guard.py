"""RequireKey in front of an application that answers everything: nobody gets in without the key, on any path."""

import asyncio
from typing import Any

import pytest
from kit.open_paths import OPEN

from lightning_rl.generation.vllm.guard import RequireKey
from lightning_rl.key import KEY

SECRET = "the-key-of-the-server"
CLOSED = [
    "/",
    "/inference/v1/generate",
    "/v1/models",
    "/v2/rerank",
    "/a-path-of-a-later-release",
    "//health",
    "/%2e%2e/",
]
WRONG = {
    "none": [],
    "empty": [(b"authorization", b"")],
    "scheme-alone": [(b"authorization", b"Bearer")],
    "other": [(b"authorization", b"Bearer another-key")],
    "beginning": [(b"authorization", f"Bearer {SECRET[:-1]}".encode())],
    "longer": [(b"authorization", f"Bearer {SECRET}x".encode())],
    "upper": [(b"authorization", f"Bearer {SECRET.upper()}".encode())],
    "basic": [(b"authorization", f"Basic {SECRET}".encode())],
    "bare": [(b"authorization", SECRET.encode())],
    "twice": [(b"authorization", f"Bearer {SECRET}".encode())] * 2,
    "other-header": [(b"x-api-key", SECRET.encode()), (b"cookie", f"key={SECRET}".encode())],
    "bytes": [(b"authorization", b"Bearer \xff\x00")],
}


class Application:
    """Answers 200 to everything, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One call, whose body is not read."""
        del receive
        self.asked.append(scope["type"] if scope["type"] == "lifespan" else scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"inside"})


@pytest.fixture
def application(monkeypatch: pytest.MonkeyPatch) -> Application:
    monkeypatch.setenv(KEY, SECRET)
    return Application()


def ask(
    application: Any, path: str = "/health", headers: Any = (), method: str = "GET", kind: str = "http"
) -> list[Any]:
    """What is sent back."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing that a stranger sends is read")

    scope = {"type": kind, "path": path, "method": method, "headers": list(headers), "query_string": b""}
    asyncio.run(application(scope, receive, send))
    return sent


@pytest.mark.parametrize("path", [*OPEN, *CLOSED])
def test_every_path_is_closed_without_the_key(path: str, application: Application) -> None:
    guarded = RequireKey(application)
    for method in ("GET", "POST", "OPTIONS", "DELETE"):
        for headers in (WRONG["none"], WRONG["other"]):
            start, body = ask(guarded, path, headers, method)
            assert start["status"] == 401 and b"inside" not in body["body"]
    assert application.asked == []


@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG)
def test_nothing_but_the_key_itself_opens_it(headers: Any, application: Application) -> None:
    assert ask(RequireKey(application), headers=headers)[0]["status"] == 401
    assert application.asked == []


@pytest.mark.parametrize("scheme", [b"Bearer", b"bearer", b"BEARER"])
@pytest.mark.parametrize("name", [b"authorization", b"Authorization"])
def test_the_key_opens_every_path(scheme: bytes, name: bytes, application: Application) -> None:
    guarded, headers = RequireKey(application), [(name, scheme + b" " + SECRET.encode())]
    for path in [*OPEN, *CLOSED]:
        assert [message.get("status", message.get("body")) for message in ask(guarded, path, headers)] == [
            200,
            b"inside",
        ]
    assert application.asked == [*OPEN, *CLOSED]


def test_a_websocket_is_closed_before_it_opens_and_unknown_kinds_go_nowhere(application: Application) -> None:
    guarded = RequireKey(application)
    assert ask(guarded, kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    assert ask(guarded, kind="webtransport") == [] and application.asked == []
    assert ask(guarded, kind="lifespan")[0]["status"] == 200 and application.asked == ["lifespan"]


@pytest.mark.parametrize("key", [None, "", "two words", "new\nline", "h\u00e9"])
def test_a_server_without_a_key_does_not_start(key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False) if key is None else monkeypatch.setenv(KEY, key)
    with pytest.raises(ValueError, match=f"expected {KEY} to hold a key of printable ASCII") as error:
        RequireKey(Application())
    assert not key or key not in str(error.value)
