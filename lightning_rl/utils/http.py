"""HTTP client for JSON, in which each call has a deadline and can be cancelled.

All calls of a process run in one thread, with aiohttp, over keep-alive connections.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import SplitResult, urlsplit

import aiohttp

from lightning_rl.utils.event_loop import REQUESTS
from lightning_rl.utils.strict_json import parse_json

PORTS = {"http": 80, "https": 443}
BUSY = (408, 429)  # statuses after which a retry may succeed
OF_REQUEST = (400, 413, 422)  # statuses that concern the request, not the client
CONNECTING = 10.0  # seconds
KEPT = 2.0  # seconds that an idle connection is kept; vLLM closes it after 5
SILENCE = 30  # seconds of silence between two TCP keepalive probes
MAX_ANSWER = 2**30  # bytes
MAX_QUOTE = 300  # characters of a server's answer in an error


class Unanswered(ConnectionError):  # noqa: N818
    """No usable answer: unreachable, too slow or invalid. The call may succeed later or at another server."""


class Refused(ValueError):  # noqa: N818
    """Server rejected a call, and would reject it again.

    Args:
        message: Description and advice.
        of_request: True if it rejects this request, False if it rejects the client.
    """

    def __init__(self, message: str, *, of_request: bool = False) -> None:
        super().__init__(message)
        self.of_request = of_request


class Cancelled(RuntimeError):  # noqa: N818
    """Call cancelled because the client was closed."""


def check_key(key: str, server: str) -> str:
    """Return a key that a header can hold.

    Raises:
        ValueError: If it has another character; the message does not contain the key.
    """
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"expected a key of printable ASCII characters for {server}, got one with another, such as a line "
            "break or a curly quote: copy the key again"
        )
    return key


class Client:
    """HTTP client of one server, for any thread and for coroutines of :data:`REQUESTS`.

    Args:
        url: URL such as ``http://127.0.0.1:8000``.
        key: Key sent as bearer token, or None.
        hints: Advice for statuses of a refusal.

    Raises:
        ValueError: If the URL or the key is invalid.
    """

    def __init__(self, url: str, key: str | None = None, hints: Mapping[int, str] = MappingProxyType({})) -> None:
        self.url, self._hints = read_url(url).geturl(), hints
        self._headers = {"Authorization": f"Bearer {check_key(key, self.url)}"} if key else {}
        self._session: aiohttp.ClientSession | None = None
        self._deadlines: set[asyncio.Timeout] = set()  # of the calls in flight
        self._closed = False

    def call(
        self, method: str, path: str, body: Any = None, *, timeout: float, parse: Callable[[bytes], Any] = parse_json
    ) -> Any:
        """Call :meth:`request` and wait for its result."""
        return REQUESTS.run(self.request(method, path, body, timeout=timeout, parse=parse))

    async def request(
        self, method: str, path: str, body: Any = None, *, timeout: float, parse: Callable[[bytes], Any] = parse_json
    ) -> Any:
        """Return the parsed answer; None for an empty one.

        Args:
            method: HTTP method.
            path: Path after the URL.
            body: Value sent as JSON, or None.
            timeout: Seconds from the connection to the last byte.
            parse: Function of the answer's bytes.

        Raises:
            Unanswered: If there is no answer in time, it is not JSON or too long, or its status is below 200, 3xx, 408,
                429, or 500 and above.
            Refused: If the status is another 4xx, or no trusted authority signed the certificate.
            Cancelled: If the client was closed.
        """
        if self._closed:
            raise Cancelled(f"{self.url}{path} was cancelled")
        deadline = asyncio.timeout(timeout)
        self._deadlines.add(deadline)
        try:
            async with deadline, self._open().request(method, self.url + path, json=body, allow_redirects=False) as got:
                status, text = got.status, await _read(got.content)
        except aiohttp.ClientConnectorCertificateError as error:
            hint, why = "name the file that signs it in SSL_CERT_FILE", error.certificate_error
            said = why.verify_message if isinstance(why, ssl.SSLCertVerificationError) else str(why)
            raise Refused(f"expected {self.url} to have a trusted certificate, got {quote(said)}: {hint}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if self._closed:
                raise Cancelled(f"{self.url}{path} was cancelled") from error
            what = quote(f"{type(error).__name__}: {str(error) or 'timed out'}")
            raise Unanswered(f"no answer from {self.url}{path}: {what}") from error
        finally:
            self._deadlines.discard(deadline)
        return self._parse(path, status, text, parse)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT, socket_factory=_open_socket)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECTING)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self._session

    def _parse(self, path: str, status: int, text: bytes, parse: Callable[[bytes], Any]) -> Any:
        quoted = quote(text[: 4 * MAX_QUOTE].decode(errors="replace"))
        if 400 <= status < 500 and status not in BUSY:
            hint = f": {self._hints[status]}" if status in self._hints else ""
            raise Refused(
                f"expected {self.url}{path} to accept the call, got status {status}: {quoted}{hint}",
                of_request=status in OF_REQUEST,
            )
        if not 200 <= status < 300:
            raise Unanswered(f"expected an answer from {self.url}{path}, got status {status}: {quoted}")
        try:
            return parse(text) if text else None
        except ValueError as error:
            raise Unanswered(f"expected JSON from {self.url}{path}, got {quoted}") from error

    def abort(self) -> None:
        """Cancel the calls in flight, which raise :class:`Unanswered`; called in the event loop."""
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Cancel all calls, later ones included, and close connections."""
        REQUESTS.run(self.aclose())

    async def aclose(self) -> None:
        """Close the client, called by a coroutine of the event loop."""
        self._closed = True
        self.abort()
        while self._deadlines:  # or a reader would find its connection closed
            await asyncio.sleep(0)
        if self._session is not None:
            await self._session.close()


async def _read(content: aiohttp.StreamReader) -> bytes:
    """Return an answer of at most :data:`MAX_ANSWER` bytes."""
    parts, size = list[bytes](), 0
    async for part in content.iter_any():
        parts.append(part)
        size += len(part)
        if size > MAX_ANSWER:
            raise ValueError(f"expected an answer of at most {MAX_ANSWER:,} bytes, got a longer one")
    return b"".join(parts)


def _open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket with TCP keepalive, so that proxies keep it open: a server sends nothing while it generates."""
    family, kind, protocol, *_ = address
    opened = socket.socket(family=family, type=kind, proto=protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        if hasattr(socket, option):
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), SILENCE)
    return opened


def read_url(text: str) -> SplitResult:
    """Return a normalized URL: lowercase, without a trailing slash and without the default port.

    Raises:
        ValueError: If it is invalid; a password in it is not quoted.

    Example:
        >>> read_url("HTTP://LocalHost:08000/").geturl()
        'http://localhost:8000'
    """
    if "@" in text:
        raise ValueError("expected a URL without a user and a password: pass the key as an option")
    try:
        parts = urlsplit(text.strip())
        host, port = parts.hostname or "", parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    if parts.scheme not in PORTS or not host or port == 0 or parts.query or parts.fragment:
        raise ValueError(f"expected a URL such as http://127.0.0.1:8000, got {text!r}")
    netloc = f"[{host}]" if ":" in host else host
    if port not in (None, PORTS[parts.scheme]):
        netloc += f":{port}"
    return SplitResult(parts.scheme, netloc, parts.path.rstrip("/"), "", "")


def quote(text: str) -> str:
    """Return the beginning of a server's text without escape sequences and line ends, for terminal and log."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:MAX_QUOTE])
