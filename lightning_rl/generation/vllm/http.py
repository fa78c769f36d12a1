"""HTTP client for JSON and text, in which each call has a deadline and a size limit, and can be cancelled.

All calls of a process run in one thread, with aiohttp, over keep-alive connections.
"""

import asyncio
import json
import re
import socket
import ssl
import sys
from ipaddress import IPv6Address
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from typing_extensions import override

from lightning_rl.utils.event_loop import EventLoop

LOOP = EventLoop("servers")
HINTS = {
    401: "pass the key of lightning-rl serve as api_key=, or set VLLM_API_KEY",
    403: "start the server by lightning-rl serve",
    404: "start the server by lightning-rl serve",
}
PORTS = {"http": 80, "https": 443}
HOST = re.compile(r"[\w.-]+")
LETTERS = re.compile(r"[\w.:/~%\[\]-]*")  # of a URL without query and fragment
BUSY = (408, 429)  # statuses after which a retry may succeed
OF_REQUEST = (400, 413, 422)  # statuses that concern the request, not the client
CONNECTING = 10.0  # seconds
KEPT = 2.0  # seconds that an idle connection is kept; vLLM closes it after 5
SILENCE, INTERVAL, PROBES = 30, 10, 6  # TCP keepalive: seconds until the first probe, between probes; number
MAX_ANSWER = 2**20  # default limit of an answer in bytes
MAX_QUOTE = 300  # characters of a server's answer in an error


class Unanswered(ConnectionError):  # noqa: N818
    """No usable answer: unreachable, too slow, too long or invalid. The call may succeed later or at another server."""


class Stale(Unanswered):
    """Kept connection that was closed before an answer began, as idle connections are."""


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


class Client:
    """HTTP client of one server, for any thread and for coroutines of :data:`LOOP`.

    A connection serves one call at a time and is kept for the next one; there is no limit on their number.

    Args:
        url: URL such as ``http://127.0.0.1:8000``.
        key: Key sent as bearer token, or None.
        ca: File of certificates that may sign that of an ``https`` server; None for those of the machine.

    Raises:
        ValueError: If the URL is invalid, or the file has no certificates.
    """

    def __init__(self, url: str, key: str | None = None, ca: Path | None = None) -> None:
        address = Address.read(url)
        self.url = str(address)
        self._trust = trust(ca) if address.scheme == "https" else True
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._session: aiohttp.ClientSession | None = None
        self._deadlines: set[asyncio.Timeout] = set()  # of the calls in flight
        self._closed = False

    def call(self, method: str, path: str, body: Any = None, *, timeout: float, limit: int = MAX_ANSWER) -> Any:
        """Call :meth:`request` and wait for its result; retry after a stale connection."""
        while True:
            try:
                return LOOP.run(self.request(method, path, body, timeout=timeout, limit=limit))
            except Stale:  # the stale connection is closed
                continue

    async def request(
        self, method: str, path: str, body: Any = None, *, timeout: float, limit: int = MAX_ANSWER
    ) -> Any:
        """Return the parsed JSON of an answer; None for an empty one.

        Raises:
            Unanswered: If it is not JSON.
        """
        text = await self._fetch(method, path, body, timeout=timeout, limit=limit)
        try:
            return json.loads(text, parse_constant=_refuse_constant) if text else None
        except (ValueError, RecursionError) as error:
            raise Unanswered(f"expected JSON from {self.url}{path}, got {_quote_bytes(text)}") from error

    async def _fetch(
        self, method: str, path: str, body: Any = None, *, timeout: float, limit: int = MAX_ANSWER
    ) -> bytearray:
        """Return the bytes of an answer.

        Args:
            method: HTTP method.
            path: Path after the URL.
            body: Value sent as JSON, or None.
            timeout: Seconds from the connection to the last byte.
            limit: Maximum number of bytes to read.

        Raises:
            Stale: If a kept connection was closed; a retry uses another one.
            Unanswered: If there is no answer in time, it is too long, or its status is below 200, 3xx, 408, 429, or
                500 and above.
            Refused: If the status is another 4xx, or no trusted authority signed the certificate.
            Cancelled: If the client was closed.
        """
        content = None if body is None else json.dumps(body).encode()
        try:
            status, text = await self._within(timeout, method, path, content, limit)
        except Unanswered:
            raise
        except aiohttp.ClientConnectorCertificateError as error:
            hint, why = "pass ca=, a file with the certificate that signs the server's", error.certificate_error
            said = why.verify_message if isinstance(why, ssl.SSLCertVerificationError) else str(why)
            raise Refused(f"expected {self.url} to have a trusted certificate, got {quote(said)}: {hint}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if self._closed:
                raise Cancelled(f"{self.url}{path} was cancelled") from error
            what = quote(f"{type(error).__name__}: {error}")
            raise Unanswered(f"no answer from {self.url}{path}: {what}") from error
        if 200 <= status < 300:
            return text
        quoted = _quote_bytes(text)
        if 400 <= status < 500 and status not in BUSY:
            hint = f": {HINTS[status]}" if status in HINTS else ""
            raise Refused(
                f"expected {self.url}{path} to accept the call, got status {status}: {quoted}{hint}",
                of_request=status in OF_REQUEST,
            )
        raise Unanswered(f"expected an answer from {self.url}{path}, got status {status}: {quoted}")

    async def _within(
        self, timeout: float, method: str, path: str, content: bytes | None, limit: int
    ) -> tuple[int, bytearray]:
        """Return status and body of one call, until the deadline or :meth:`abort`."""
        if self._closed:
            raise Cancelled(f"{self.url}{path} was cancelled before it began")
        deadline = asyncio.timeout(timeout)
        try:
            async with deadline:
                self._deadlines.add(deadline)
                return await self._exchange(method, path, content, limit, min(timeout, CONNECTING))
        except TimeoutError as error:
            raise TimeoutError(str(error) or "timed out") from error
        finally:
            self._deadlines.discard(deadline)

    async def _exchange(
        self, method: str, path: str, content: bytes | None, limit: int, connecting: float
    ) -> tuple[int, bytearray]:
        session, url, kept, text = self._open(), self.url + path, list[bool](), bytearray()
        patience = aiohttp.ClientTimeout(total=None, sock_connect=connecting)
        try:
            async with session.request(
                method, url, data=content, allow_redirects=False, timeout=patience, trace_request_ctx=kept
            ) as answer:
                async for piece in answer.content.iter_any():
                    text += piece
                    if len(text) > limit:
                        raise OSError(f"an answer of more than {limit} bytes")
                return answer.status, text
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if kept and not self._closed:
                raise Stale(f"no answer from {url}: {quote(f'{type(error).__name__}: {error}')}") from error
            raise

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            tracing = aiohttp.TraceConfig()
            tracing.on_connection_reuseconn.append(_note_reuse)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, ssl=self._trust, keepalive_timeout=KEPT, socket_factory=_open_socket
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                auto_decompress=False,
                trace_configs=[tracing],
            )
        return self._session

    def abort(self) -> None:
        """Cancel the calls in flight, which raise :class:`Unanswered`."""
        if self._deadlines:
            LOOP.call_soon(self._expire)

    def _expire(self) -> None:
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Cancel all calls, later ones included, and close connections."""
        LOOP.run(self._close())

    async def _close(self) -> None:
        self._closed = True
        self._expire()
        while self._deadlines:  # or a reader would find its connection closed
            await asyncio.sleep(0)
        if self._session is not None:
            await self._session.close()


async def _note_reuse(
    _: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceConnectionReuseconnParams
) -> None:
    """Record that a request uses a kept connection."""
    context.trace_request_ctx.append(True)


def _open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket with TCP keepalive, so that proxies keep it open and a dead peer is noticed.

    An answer that is not streamed sends nothing until it is complete.
    """
    family, kind, protocol, *_ = address
    opened = socket.socket(family=family, type=kind, proto=protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    return opened


class Address(NamedTuple):
    """Normalized URL of a server: lowercase, without a trailing slash."""

    scheme: str
    host: str
    port: int
    path: str  # path of a proxy, or empty

    @staticmethod
    def read(text: str) -> "Address":
        """Parse a URL.

        Raises:
            ValueError: If it is invalid; a password in it is not quoted.

        Example:
            >>> str(Address.read("HTTP://LocalHost:08000/"))
            'http://localhost:8000'
        """
        if "@" in text:
            raise ValueError("expected a URL without a user and a password: the key of servers is api_key=")
        try:
            parts = urlsplit(text)
            host, port = parts.hostname or "", parts.port
            sound = IPv6Address(host) if ":" in host else HOST.fullmatch(host)
        except ValueError:
            raise _no_url(text) from None
        if parts.scheme not in PORTS or not sound or port == 0 or not LETTERS.fullmatch(text.strip()):
            raise _no_url(text)
        return Address(parts.scheme, host, port or PORTS[parts.scheme], parts.path.rstrip("/"))

    @override
    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"


def _no_url(text: str) -> ValueError:
    return ValueError(f"expected a URL such as http://127.0.0.1:8000, got {text!r}")


def trust(ca: Path | None) -> ssl.SSLContext:
    """Return an SSL context that trusts the certificates in a file, or by default those of the machine.

    Raises:
        ValueError: If the file has none.
    """
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ValueError(f"expected ca to be a file of certificates in PEM, got {str(ca)!r}: {error}") from error


def quote(text: str) -> str:
    """Return the beginning of a server's text without escape sequences and line ends, for terminal and log."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:MAX_QUOTE])


def _quote_bytes(text: bytearray) -> str:
    return quote(bytes(text[: 4 * MAX_QUOTE]).decode(errors="replace"))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"expected a number, got {name}")
