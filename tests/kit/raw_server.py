"""RawServer: takes a request over HTTP and sends the bytes of a test, at a given pace."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


def whole(status: int = 200, body: bytes = b"{}") -> bytes:
    """A well-formed answer."""
    return b"HTTP/1.1 %d Said\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


class RawServer:
    """One server on loopback, with a thread for each call.

    Args:
        script: from a connection whose request was read, and the path that was asked for, to nothing: it sends what it
            likes. What it raises of :class:`OSError` means that the client hung up.

    Attributes:
        sent: bytes that clients let it send, counted by :meth:`send`.
        left: set once a client hung up before it had everything.
    """

    def __init__(self, script: Callable[["RawServer", socket.socket, str], None]) -> None:
        self.script, self.sent, self.left = script, 0, threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def send(self, connection: socket.socket, data: bytes) -> None:
        """Sends and counts."""
        connection.sendall(data)
        self.sent += len(data)

    def close(self) -> None:
        """Takes no more calls."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                head, _, body = _read_until(connection, b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
                )
                while len(body) < length:
                    body += connection.recv(2**16)
                self.script(self, connection, head.split(b" ")[1].decode())
            except OSError:
                self.left.set()


def _read_until(connection: socket.socket, end: bytes) -> tuple[bytes, bytes, bytes]:
    data = b""
    while end not in data:
        piece = connection.recv(2**16)
        if not piece:
            raise OSError("hung up")
        data += piece
    return data.partition(end)


@contextmanager
def raw_server(script: Callable[[RawServer, socket.socket, str], None]) -> Iterator[RawServer]:
    """End the server, also after an exception."""
    server = RawServer(script)
    try:
        yield server
    finally:
        server.close()
