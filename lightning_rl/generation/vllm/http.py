"""JSON over HTTP with a time limit, from many threads, each call of which another thread can cut short."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

HINTS = {
    401: "pass api_key=, or set VLLM_API_KEY, as lightning-rl serve printed it",
    403: "start the server by lightning-rl serve",
    404: "start the server by lightning-rl serve",
}
BUSY = (408, 429)  # of a proxy: later it may take the call
CONNECTING = 10.0  # seconds
MAX_QUOTE = 300  # characters of an answer that an error quotes


class Unanswered(ConnectionError):  # noqa: N818
    """No usable answer: nobody there, too slow, broken. The same call may well succeed later or elsewhere."""


class Cancelled(RuntimeError):  # noqa: N818
    """The call was cut short by its own side."""


class Calls:
    """Calls in flight, to be cut short together. A server notices, and ends what it was doing for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: set[http.client.HTTPConnection] = set()
        self.cancelled = threading.Event()

    @contextmanager
    def track(self, connection: http.client.HTTPConnection) -> Iterator[None]:
        """One call, connected; raises :class:`Cancelled` if it is too late for it."""
        with self._lock:
            self._connections.add(connection)
        try:
            if self.cancelled.is_set():
                raise Cancelled("the call was cut short before it began")
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)

    def abort(self) -> None:
        """Ends the calls in flight, which then count as unanswered."""
        with self._lock:
            for connection in self._connections:
                sock: socket.socket | None = connection.sock
                with suppress(OSError):
                    if sock is not None:
                        sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads, which close does not

    def cancel(self) -> None:
        """Ends all calls by our own will, those that begin later included."""
        self.cancelled.set()
        self.abort()


class Client:
    """Calls one server; each call has a connection of its own, so none is stale and any can be cut short.

    Args:
        url: such as ``http://127.0.0.1:8000``.
        key: sent as bearer token; None for none.

    Raises:
        ValueError: if the URL is none.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected a URL such as http://127.0.0.1:8000, got {url!r}")
        self.url = url.rstrip("/")
        self._connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._netloc, self._prefix = parts.netloc, parts.path.rstrip("/")
        self.calls = Calls()
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def call(self, method: str, path: str, body: Any = None, *, timeout: float, calls: Calls | None = None) -> Any:
        """The answer, parsed; None for an empty one. Besides :attr:`calls`, ``calls`` can cut it short.

        Raises:
            Unanswered: if there is no answer, or one with a status of 500 and above, 408 or 429, or none in JSON.
            ValueError: if the server refuses the call itself, status 400 to 499; doing it again would not help.
            Cancelled: if the call was cut short.
        """
        connection = self._connection(self._netloc, timeout=min(timeout, CONNECTING))
        content = None if body is None else json.dumps(body)
        calls = Calls() if calls is None else calls
        try:
            connection.connect()
            connection.sock.settimeout(timeout)
            with self.calls.track(connection), calls.track(connection):
                connection.request(method, self._prefix + path, content, headers=self._headers)
                answer = connection.getresponse()
                status, text = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            if self.calls.cancelled.is_set() or calls.cancelled.is_set():
                raise Cancelled(f"{self.url}{path} was cut short") from error
            raise Unanswered(f"no answer from {self.url}{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        quoted = text[:MAX_QUOTE].decode(errors="replace")
        if status >= 500 or status in BUSY:
            raise Unanswered(f"expected an answer from {self.url}{path}, got status {status}: {quoted}")
        if status >= 400:
            hint = f": {HINTS[status]}" if status in HINTS else ""
            raise ValueError(f"expected {self.url}{path} to take the call, got status {status}: {quoted}{hint}")
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise Unanswered(f"expected JSON from {self.url}{path}, got {quoted}") from error
