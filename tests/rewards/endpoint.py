"""Local HTTP server whose answers a script gives."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import override

Script = Callable[[dict[str, Any], int], tuple[int, Any]]
"""Function from a body and the number of earlier requests with it to status and content: bytes, or a value as JSON."""


class Endpoint:
    """Server on loopback, with body and headers of its requests."""

    def __init__(self, script: Script) -> None:
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.now = self.peak = 0
        lock, endpoint = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    seen = sum(known == body for known, _ in endpoint.requests)
                    endpoint.requests.append((body, dict(self.headers) | {"path": self.path}))
                    endpoint.now += 1
                    endpoint.peak = max(endpoint.peak, endpoint.now)
                try:
                    status, answer = script(body, seen)
                finally:
                    with lock:
                        endpoint.now -= 1
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                try:
                    self.send_response(status)
                    if content is not answer:
                        self.send_header("Content-Type", "application/json")
                    if 300 <= status < 400:
                        self.send_header("Location", "/elsewhere")
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:  # the client has hung up
                    pass

            @override
            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def serving(script: Script) -> Iterator[Endpoint]:
    """Serve inside the context."""
    endpoint = Endpoint(script)
    thread = threading.Thread(target=endpoint.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.server.shutdown()
        thread.join()
        endpoint.server.server_close()
