"""HTTP client: deadlines, unusable answers, cancelled calls, kept connections and certificates."""

import shutil
import socket
import ssl
import subprocess
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kit.raw_server import RawServer, raw_server, whole
from kit.scripted_server import KEY, ScriptedServer, servers

from lightning_rl.utils import http
from lightning_rl.utils.event_loop import REQUESTS
from lightning_rl.utils.http import Cancelled, Client, Refused, Unanswered, _open_socket


def ask(server: RawServer, path: str = "/", **options: Any) -> Any:
    """Return the answer to one call of a new client."""
    with closing(Client(server.url)) as client:
        return client.call("GET", path, **dict[str, Any](timeout=20) | options)


def trickle(server: RawServer, connection: socket.socket, path: str) -> None:
    """Send one byte at a time, each within any limit for a single read."""
    for byte in whole(body=b" " * 10**6):
        server.send(connection, bytes([byte]))
        if server.left.wait(0.005):
            return


def test_a_slow_answer_ends_at_the_deadline() -> None:
    with raw_server(trickle) as server:
        begin = time.monotonic()
        with pytest.raises(Unanswered, match="TimeoutError: timed out"):
            ask(server, timeout=0.5)
        assert 0.49 < time.monotonic() - begin < 5
        assert server.left.wait(20), "the connection was closed"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        pytest.param(whole(body=b"\xff\xfe"), "expected JSON from", id="no-text"),
        pytest.param(whole(body=b"[NaN]"), "expected JSON from", id="nan"),
        pytest.param(whole(body=b"[" * 10**5), "expected JSON from", id="deep"),
        pytest.param(whole(302, b""), "got status 302", id="redirection"),
        pytest.param(whole(503, b"no"), "got status 503: no", id="503"),
        pytest.param(whole()[:-1], "ClientPayloadError", id="cut"),
        pytest.param(b"", "no answer from", id="nothing"),
    ],
)
def test_an_unusable_answer_raises_unanswered(answer: bytes, message: str) -> None:
    with (
        raw_server(lambda server, connection, _: server.send(connection, answer)) as server,
        pytest.raises(Unanswered, match=message),
    ):
        ask(server)


def test_an_answer_above_the_limit_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_ANSWER", 100)
    answer = whole(body=b"1" * 101)
    with (
        raw_server(lambda server, connection, _: server.send(connection, answer)) as server,
        pytest.raises(Unanswered, match="at most 100 bytes, got a longer one"),
    ):
        ask(server)


@pytest.mark.parametrize(("status", "of_request"), [(400, True), (413, True), (422, True), (401, False), (404, False)])
def test_a_refusal_concerns_the_request_or_the_client(status: int, of_request: bool) -> None:
    with (
        raw_server(lambda server, connection, _: server.send(connection, whole(status))) as server,
        pytest.raises(Refused, match=f"got status {status}") as refusal,
    ):
        ask(server)
    assert refusal.value.of_request is of_request


def test_a_call_is_cancelled_while_its_answer_arrives() -> None:
    begun, ended = threading.Event(), list[type]()

    def stall(server: RawServer, connection: socket.socket, path: str) -> None:
        server.send(connection, b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        begun.set()
        connection.recv(1)

    with raw_server(stall) as server:
        client = Client(server.url)

        def wait() -> None:
            try:
                client.call("GET", "/", timeout=60)
            except (Unanswered, Cancelled) as error:
                ended.append(type(error))

        for end in (lambda: REQUESTS.call_soon(client.abort), client.close):
            asking = threading.Thread(target=wait)
            asking.start()
            assert begun.wait(20)
            begun.clear()
            end()
            asking.join(20)
        with pytest.raises(Cancelled, match="was cancelled"):
            client.call("GET", "/", timeout=60)
    assert ended == [Unanswered, Cancelled]


def test_a_connection_serves_many_calls_and_has_tcp_keepalive() -> None:
    server = ScriptedServer()
    with servers(server), closing(Client(server.url, KEY)) as client:
        for _ in range(5):
            client.call("GET", "/version", timeout=20)
        assert server.connections == 1
    with closing(_open_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1)))) as opened:
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a self-signed certificate for loopback and its key."""
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https_needs_a_trusted_certificate(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server = ScriptedServer(context=context)
    with servers(server):
        assert server.url.startswith("https://")
        with closing(Client(server.url, KEY)) as client, monkeypatch.context() as patched:
            trusting = ssl.create_default_context(cafile=certificate[0])  # as at the start under SSL_CERT_FILE
            patched.setattr(aiohttp.connector, "_SSL_CONTEXT_VERIFIED", trusting)
            assert client.call("GET", "/version", timeout=20) == {"version": "0.32.0"}
        with (
            closing(Client(server.url, KEY)) as client,
            pytest.raises(
                Refused,
                match=r"trusted certificate, got self.signed certificate: name the file that signs it",
            ),
        ):
            client.call("GET", "/version", timeout=20)
        with closing(Client(server.url.replace("https", "http"), KEY)) as client, pytest.raises(Unanswered):
            client.call("GET", "/version", timeout=20)
        assert server.calls == ["/version"]


def test_a_key_that_no_header_holds_is_refused_and_not_shown() -> None:
    with pytest.raises(ValueError, match="expected a key of printable ASCII") as refused:
        Client("http://127.0.0.1:1", "secret\n")
    assert "secret" not in str(refused.value)
