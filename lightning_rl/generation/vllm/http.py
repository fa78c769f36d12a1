"""JSON over HTTP, from many threads: each call ends at a deadline, reads no more than a limit, and can be cut short."""

import http.client
import io
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import override

HINTS = {
    401: "pass api_key=, or set VLLM_API_KEY, to the key that lightning-rl serve was started with",
    403: "start the server by lightning-rl serve",
    404: "start the server by lightning-rl serve",
}
BUSY = (408, 429)  # of a proxy: later it may take the call
OF_REQUEST = (400, 413, 422)  # what is refused is the request, not whoever asks
CONNECTING = 10.0  # seconds
MAX_ANSWER = 2**20  # bytes of an answer, its head included, unless a call allows for more
PIECE = 2**16  # bytes that are read at once
MAX_QUOTE = 300  # characters of what a server says that an error quotes


class Unanswered(ConnectionError):  # noqa: N818
    """No usable answer: nobody there, too slow, too long, broken. The call may well succeed later or elsewhere."""


class Refused(ValueError):  # noqa: N818
    """A server that is there refuses a call, and would again.

    Args:
        message: what was refused, and what helps.
        of_request: whether it is this one request that it refuses, and not everything that the same client asks.
    """

    def __init__(self, message: str, *, of_request: bool = False) -> None:
        super().__init__(message)
        self.of_request = of_request


class Cancelled(RuntimeError):  # noqa: N818
    """The call was cut short by its own side."""


class Calls:
    """Calls in flight, to be cut short together. A server notices, and ends what it was doing for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self.cancelled = threading.Event()

    @contextmanager
    def track(self, sock: socket.socket) -> Iterator[None]:
        """One call, connected; raises :class:`Cancelled` if it is too late for it."""
        with self._lock:
            self._sockets.add(sock)
        try:
            if self.cancelled.is_set():
                raise Cancelled("the call was cut short before it began")
            yield
        finally:
            with self._lock:
                self._sockets.discard(sock)

    def abort(self) -> None:
        """Ends the calls in flight, which then count as unanswered."""
        with self._lock:
            for sock in self._sockets:
                with suppress(OSError):
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
        ca: a file of the certificates that an ``https`` server may be signed by; None for those of the machine.

    Raises:
        ValueError: if the URL is none, or the file holds no certificates.
    """

    def __init__(self, url: str, key: str | None = None, ca: Path | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected a URL such as http://127.0.0.1:8000, got {url!r}")
        self.url = url.rstrip("/")
        self._connection = http.client.HTTPConnection
        if parts.scheme == "https":
            self._connection = partial(http.client.HTTPSConnection, context=trust(ca))
        self._netloc, self._prefix = parts.netloc, parts.path.rstrip("/")
        self.calls = Calls()
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout: float,
        limit: int = MAX_ANSWER,
        calls: Calls | None = None,
    ) -> Any:
        """The answer, parsed; None for an empty one. Besides :attr:`calls`, ``calls`` can cut it short.

        Args:
            method: of HTTP.
            path: after that of the URL.
            body: sent as JSON; None for none.
            timeout: seconds for all of it, from the connection to the last byte.
            limit: bytes that are read, whatever the answer says of its length.
            calls: to be cut short with others.

        Raises:
            Unanswered: if there is no answer in time, one that is too long, one with a status of 408, 429, 500 and
                above or below 200, a redirection, or none in JSON.
            Refused: for a status of 400 to 499, or a certificate that nobody we trust has signed.
            Cancelled: if the call was cut short.
        """
        content = None if body is None else json.dumps(body)
        calls = Calls() if calls is None else calls
        try:
            status, text = self._exchange(method, self._prefix + path, content, timeout, limit, calls)
        except ssl.SSLCertVerificationError as error:
            hint = "pass ca=, a file with the certificate that signs the server's"
            raise Refused(f"expected {self.url} to prove who it is, got {error.verify_message}: {hint}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: of a socket that was cut short
            if self.calls.cancelled.is_set() or calls.cancelled.is_set():
                raise Cancelled(f"{self.url}{path} was cut short") from error
            raise Unanswered(f"no answer from {self.url}{path}: {quote(f'{type(error).__name__}: {error}')}") from error
        quoted = quote(bytes(text[: 4 * MAX_QUOTE]).decode(errors="replace"))
        if 400 <= status < 500 and status not in BUSY:
            hint = f": {HINTS[status]}" if status in HINTS else ""
            raise Refused(
                f"expected {self.url}{path} to take the call, got status {status}: {quoted}{hint}",
                of_request=status in OF_REQUEST,
            )
        if not 200 <= status < 300:
            raise Unanswered(f"expected an answer from {self.url}{path}, got status {status}: {quoted}")
        try:
            return json.loads(text, parse_constant=_refuse_constant) if text else None
        except (ValueError, RecursionError) as error:
            raise Unanswered(f"expected JSON from {self.url}{path}, got {quoted}") from error

    def _exchange(
        self, method: str, path: str, content: str | None, timeout: float, limit: int, calls: Calls
    ) -> tuple[int, bytearray]:
        """Status and body of one call."""
        end = time.monotonic() + timeout
        connection, text = self._connection(self._netloc, timeout=min(timeout, CONNECTING)), bytearray()
        try:
            connection.connect()
            sock = connection.sock
            connection.sock = _BoundedSocket(sock, end, limit)  # pyright: ignore[reportAttributeAccessIssue]
            with self.calls.track(sock), calls.track(sock):
                connection.request(method, path, content, headers=self._headers)
                with connection.getresponse() as answer:
                    while piece := answer.read(PIECE):
                        text += piece
                    if answer.length:
                        raise http.client.IncompleteRead(b"", answer.length)
                    return answer.status, text
        finally:
            connection.close()


def trust(ca: Path | None) -> ssl.SSLContext:
    """Whose certificates are taken: those that a file holds, or without one those of the machine.

    Raises:
        ValueError: if the file holds none.
    """
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ValueError(f"expected ca to be a file of certificates in PEM, got {str(ca)!r}: {error}") from error


class _BoundedSocket:
    """As much of a socket as ``http.client`` uses, with one deadline for all of it and a limit of what is read."""

    def __init__(self, sock: socket.socket, end: float, limit: int) -> None:
        self._sock, self._end, self._limit, self._left = sock, end, limit, limit

    def sendall(self, data: bytes) -> None:
        self.begin()
        self._sock.sendall(data)  # whose own limit is for all of the data

    def makefile(self, mode: str) -> io.BufferedReader:
        del mode
        return io.BufferedReader(_BoundedReader(self, self._sock.makefile("rb", buffering=0)))

    def close(self) -> None:
        self._sock.close()  # for good once the reader is closed as well

    def begin(self) -> None:
        """Lets the next operation take the time that is left."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)

    def count(self, number: int) -> None:
        """Takes bytes off what may be read."""
        self._left -= number
        if self._left < 0:
            raise OSError(f"an answer of more than {self._limit} bytes")


class _BoundedReader(io.RawIOBase):
    def __init__(self, sock: _BoundedSocket, file: io.RawIOBase) -> None:
        self._sock, self._file = sock, file

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any) -> int | None:
        self._sock.begin()
        number = self._file.readinto(buffer)
        self._sock.count(number or 0)
        return number

    @override
    def close(self) -> None:
        self._file.close()
        super().close()


def quote(text: str) -> str:
    """The beginning of what a server said, fit for a terminal and a log: without escape sequences and line ends."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:MAX_QUOTE])


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"expected a number, got {name}")
