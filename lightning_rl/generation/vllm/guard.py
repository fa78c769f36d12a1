"""RequireKey: lets nobody who lacks the key reach any path of a server."""

import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from lightning_rl.key import KEY, check_key

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
REFUSAL = json.dumps({"error": "expected the header Authorization: Bearer, and the key of this server"}).encode()
HEADERS = [
    (b"content-type", b"application/json"),
    (b"content-length", str(len(REFUSAL)).encode()),
    (b"www-authenticate", b"Bearer"),
    (b"connection", b"close"),  # what else it sends is not read
]


class RequireKey:
    """An ASGI application in front of another, which sees only what comes with the key.

    It looks at no path and no method, so what a server adds later is closed as well. ``lightning-rl serve`` has vLLM
    put it before everything else (``--middleware``), which calls it with the application alone: the key comes from the
    environment.

    Args:
        app: what it protects.

    Raises:
        ValueError: if ``VLLM_API_KEY`` holds no key; a server without one does not start.
    """

    def __init__(self, app: App) -> None:
        key = os.environ.get(KEY, "")
        check_key(key, KEY)
        self._app, self._digest = app, _digest(key.encode())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Passes a call on, or answers it with 401; a websocket is closed before it opens."""
        kind = scope["type"]
        if kind == "lifespan" or self._has_key(scope.get("headers", ())):
            await self._app(scope, receive, send)
        elif kind == "http":
            await send({"type": "http.response.start", "status": 401, "headers": HEADERS})
            await send({"type": "http.response.body", "body": REFUSAL})
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})

    def _has_key(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name.lower() == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        # The digests have one length, so the time says nothing about the key, its length included.
        return hmac.compare_digest(_digest(key), self._digest) and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
