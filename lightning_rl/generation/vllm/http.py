"""JSON and text over HTTP: each call ends at a deadline, reads no more than a limit, and can be cut short.

All calls of a process are made in one thread, by aiohttp, over connections that are kept from call to call.
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

from lightning_rl.event_loop import EventLoop

LOOP = EventLoop("servers")
HINTS = {
    401: "pass api_key=, or set VLLM_API_KEY, to the key that lightning-rl serve was started with",
    403: "start the server by lightning-rl serve",
    404: "start the server by lightning-rl serve",
}
PORTS = {"http": 80, "https": 443}
HOST = re.compile(r"[\w.-]+")
LETTERS = re.compile(r"[\w.:/~%\[\]-]*")  # of a URL without a query and a fragment
BUSY = (408, 429)  # of a proxy: later it may take the call
OF_REQUEST = (400, 413, 422)  # what is refused is the request, not whoever asks
CONNECTING = 10.0  # seconds
KEPT = 2.0  # seconds that a connection is kept without a call; vLLM closes it after 5
SILENCE, INTERVAL, PROBES = 30, 10, 6  # of a silent connection: seconds until it is probed, between probes; how many
MAX_ANSWER = 2**20  # bytes of an answer, unless a call allows for more
MAX_QUOTE = 300  # characters of what a server says that an error quotes


class Unanswered(ConnectionError):  # noqa: N818
    """No usable answer: nobody there, too slow, too long, broken. The call may well succeed later or elsewhere."""


class Stale(Unanswered):
    """A connection that was kept has ended before an answer began, as it does once nobody has used it for a while."""


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
    """The call was cut short by its own side, which has closed the client."""


class Client:
    """Calls one server, from any thread or from coroutines of :data:`LOOP`.

    A connection serves one call at a time, and is kept for the next one; those in use are as many as there are calls.

    Args:
        url: such as ``http://127.0.0.1:8000``.
        key: sent as bearer token; None for none.
        ca: a file of the certificates that an ``https`` server may be signed by; None for those of the machine.

    Raises:
        ValueError: if the URL is none, or the file holds no certificates.
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
        """What :meth:`request` returns, for a thread that waits for it; made again if a connection was stale."""
        while True:
            try:
                return LOOP.run(self.request(method, path, body, timeout=timeout, limit=limit))
            except Stale:  # which is kept no more
                continue

    async def request(
        self, method: str, path: str, body: Any = None, *, timeout: float, limit: int = MAX_ANSWER
    ) -> Any:
        """The answer of :meth:`_fetch`, parsed as JSON; None for an empty one.

        Raises:
            Unanswered: if it is no JSON.
        """
        text = await self._fetch(method, path, body, timeout=timeout, limit=limit)
        try:
            return json.loads(text, parse_constant=_refuse_constant) if text else None
        except (ValueError, RecursionError) as error:
            raise Unanswered(f"expected JSON from {self.url}{path}, got {_quote_bytes(text)}") from error

    async def _fetch(
        self, method: str, path: str, body: Any = None, *, timeout: float, limit: int = MAX_ANSWER
    ) -> bytearray:
        """The bytes of an answer.

        Args:
            method: of HTTP.
            path: after that of the URL.
            body: sent as JSON; None for none.
            timeout: seconds for all of it, from the connection to the last byte.
            limit: bytes that are read, whatever the answer says of its length.

        Raises:
            Stale: if it went through a connection that has ended; another one, or a new one, may do.
            Unanswered: if there is no answer in time, one that is too long, one with a status of 408, 429, 500 and
                above or below 200, or a redirection.
            Refused: for a status of 400 to 499, or a certificate that nobody we trust has signed.
            Cancelled: if the client was closed.
        """
        content = None if body is None else json.dumps(body).encode()
        try:
            status, text = await self._within(timeout, method, path, content, limit)
        except Unanswered:
            raise
        except aiohttp.ClientConnectorCertificateError as error:
            hint, why = "pass ca=, a file with the certificate that signs the server's", error.certificate_error
            said = why.verify_message if isinstance(why, ssl.SSLCertVerificationError) else str(why)
            raise Refused(f"expected {self.url} to prove who it is, got {quote(said)}: {hint}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if self._closed:
                raise Cancelled(f"{self.url}{path} was cut short") from error
            what = quote(f"{type(error).__name__}: {error}")
            raise Unanswered(f"no answer from {self.url}{path}: {what}") from error
        if 200 <= status < 300:
            return text
        quoted = _quote_bytes(text)
        if 400 <= status < 500 and status not in BUSY:
            hint = f": {HINTS[status]}" if status in HINTS else ""
            raise Refused(
                f"expected {self.url}{path} to take the call, got status {status}: {quoted}{hint}",
                of_request=status in OF_REQUEST,
            )
        raise Unanswered(f"expected an answer from {self.url}{path}, got status {status}: {quoted}")

    async def _within(
        self, timeout: float, method: str, path: str, content: bytes | None, limit: int
    ) -> tuple[int, bytearray]:
        """Status and body of one call, until the deadline, which may come early."""
        if self._closed:
            raise Cancelled(f"{self.url}{path} was cut short before it began")
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
        """Ends the calls in flight, which then count as unanswered."""
        if self._deadlines:
            LOOP.call_soon(self._expire)

    def _expire(self) -> None:
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Ends all calls by our own will, those that begin later included; connections are closed."""
        LOOP.run(self._close())

    async def _close(self) -> None:
        self._closed = True
        self._expire()
        while self._deadlines:  # or what still reads would find its connection gone
            await asyncio.sleep(0)
        if self._session is not None:
            await self._session.close()


async def _note_reuse(
    _: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceConnectionReuseconnParams
) -> None:
    """Tells a request that it goes through a connection that was used before."""
    context.trace_request_ctx.append(True)


def _open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """One that the system probes when it is silent, so that nobody on the way takes it for dead, and its death is seen.

    An answer that is not streamed says nothing until it is whole.
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
    """A server's URL in the one spelling in which two of them are compared: small letters, no slash at the end."""

    scheme: str
    host: str
    port: int
    path: str  # of a proxy; empty for none

    @staticmethod
    def read(text: str) -> "Address":
        """The parts of a URL.

        Raises:
            ValueError: if it is none that leads to a server; a password that it holds is not quoted.

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
    """Whose certificates are taken: those that a file holds, or without one those of the machine.

    Raises:
        ValueError: if the file holds none.
    """
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ValueError(f"expected ca to be a file of certificates in PEM, got {str(ca)!r}: {error}") from error


def quote(text: str) -> str:
    """The beginning of what a server said, fit for a terminal and a log: without escape sequences and line ends."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:MAX_QUOTE])


def _quote_bytes(text: bytearray) -> str:
    return quote(bytes(text[: 4 * MAX_QUOTE]).decode(errors="replace"))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"expected a number, got {name}")
