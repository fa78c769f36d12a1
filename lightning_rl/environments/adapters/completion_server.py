"""Endpoint: where a program on this machine asks for tokens over HTTP, as it would ask a server of vLLM.

One route, ``POST /inference/v1/generate``, on loopback, at a port of its own, behind a secret. A request goes to the
:class:`Line` of the conversation that its header ``X-Session-ID`` names, and is answered when that conversation has the
tokens. Nothing is drawn here: the endpoint carries token ids one way and token ids the other.
"""

import contextlib
import hmac
import json
import queue
import secrets
import socketserver
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler
from typing import Any, cast

from typing_extensions import override

from lightning_rl.environments.failure import TIMEOUT, EnvironmentFailureError, Failure
from lightning_rl.rollout import FinishReason

ROUTE = "/inference/v1/generate"
SESSION = "X-Session-ID"
MAX_BODY = 2**26  # bytes of a request
PATIENCE = 10.0  # seconds that a client may take to send what it has begun to
POLL = 0.02  # seconds after which the server notices that it is to end
BACKLOG = 1024  # connections that wait to be accepted
OURS = frozenset({"stop_token_ids", "logprobs", "skip_special_tokens", "routed_experts_prompt_start"})
"""What every request says of its sampling, and changes nothing of what is drawn."""
KNOWN = frozenset({"model", "token_ids", "sampling_params", "cache_salt", "priority"})
REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a program gets for a request.

    Args:
        status: of HTTP.
        body: as JSON.
    """

    status: int
    body: Mapping[str, Any]

    @staticmethod
    def error(status: int, message: str) -> "Reply":
        """In words."""
        return Reply(status=status, body={"error": {"message": message, "code": status}})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """A request for the tokens that follow a prefix.

    Args:
        token_ids: the prefix.
        session: that asks.
        stop_token_ids: at which the program takes an answer to end.
    """

    token_ids: tuple[int, ...]
    session: str = ""
    stop_token_ids: frozenset[int] = frozenset()
    reply: "Future[Reply]" = field(default_factory=Future)

    def answer(self, token_ids: Sequence[int], finish: FinishReason) -> None:
        """Hands over what was drawn, all of it; its log-probabilities are the trainer's alone, and are sent as 0."""
        content = [{"token": f"token_id:{token}", "logprob": 0.0} for token in token_ids]
        choice = {
            "index": 0,
            "token_ids": list(token_ids),
            "logprobs": {"content": content},
            "finish_reason": REASONS[finish],
        }
        self._set(Reply(status=200, body={"request_id": self.session, "choices": [choice]}))

    def refuse(self, message: str, status: int = 400) -> None:
        """Hands over an error, if nothing was handed over yet."""
        self._set(Reply.error(status, message))

    def _set(self, reply: Reply) -> None:
        if not self.reply.done():
            self.reply.set_result(reply)


class Line:
    """The line of one conversation: its program asks at one end, the conversation waits at the other.

    One request at a time: a program that asks for two answers at once has a tree, which no row holds.

    Args:
        seconds: that the program has for the whole conversation; those of the policy are not counted.

    Attributes:
        ended: set once the program has ended.
    """

    def __init__(self, seconds: float) -> None:
        self.ended = threading.Event()
        self._whole, self._left = seconds, seconds
        self._inbox: queue.SimpleQueue[Question | BaseException | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: Question | None = None
        self._closed = False

    def ask(self, question: Question) -> Reply:
        """Waits for the answer to a question; called by whoever serves the program."""
        with self._lock:
            busy = self._pending is not None and not self._pending.reply.done()
            if not self._closed and not busy:
                self._pending = question
                self._inbox.put(question)
        if self._closed:
            return Reply.error(410, "the conversation has ended")
        if busy:
            return self.fail("one request at a time, got a second one before the first was answered")
        return question.reply.result()

    def fail(self, wrong: str) -> Reply:
        """Ends the conversation for what a program asks, and says so to the program."""
        message = f"expected {wrong}"
        self._inbox.put(ValueError(message))
        return Reply.error(400, message)

    def end(self, error: BaseException | None = None) -> None:
        """Says that the program has ended, and what with."""
        self._inbox.put(error)
        self.ended.set()

    def wait(self) -> Question | None:
        """The next question; None if the program has ended.

        Raises:
            EnvironmentFailureError: if the program takes longer than it has.
            BaseException: what the program ended with, or what is wrong with what it asks.
        """
        begin = time.monotonic()
        try:
            said = self._inbox.get(timeout=max(self._left, 0.0))
        except queue.Empty:
            message = f"the program took longer than {self._whole:g} s for a conversation (timeout)"
            raise EnvironmentFailureError(Failure(kind=TIMEOUT, message=message)) from None
        finally:
            self._left -= time.monotonic() - begin
        if isinstance(said, BaseException):
            raise said
        return said

    def close(self) -> None:
        """Refuses what is asked and will be."""
        with self._lock:
            self._closed = True
        if self._pending is not None:
            self._pending.refuse("the conversation has ended", 410)


class Endpoint:
    """A server on loopback, from its making to :meth:`close`.

    Attributes:
        url: where it listens.
        secret: that every request has to carry as bearer token.
    """

    def __init__(self) -> None:
        self.secret = secrets.token_urlsafe(32)
        self._lines: dict[str, Line] = {}
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL,), name=f"endpoint {self.url}", daemon=True
        )
        self._thread.start()

    def connect(self, session: str, line: Line) -> None:
        """Has requests of a session go to a line."""
        self._lines[session] = line

    def disconnect(self, line: Line) -> None:
        """Forgets the sessions of a line."""
        for session in [session for session, other in list(self._lines.items()) if other is line]:
            del self._lines[session]

    def close(self) -> None:
        """Ends it: nobody listens any more, and nobody waits."""
        for line in list(self._lines.values()):
            line.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        for thread in list(self._server.threads):
            thread.join(PATIENCE)

    def serve(self, path: str, headers: Message, body: bytes) -> Reply:
        """What a request is answered with."""
        if not hmac.compare_digest(headers.get("Authorization", "").encode(), f"Bearer {self.secret}".encode()):
            return Reply.error(401, "expected the secret of the run as bearer token")
        if path != ROUTE:
            return Reply.error(404, f"expected {ROUTE}")
        session = headers.get(SESSION, "")
        line = self._lines.get(session)
        if line is None:
            return Reply.error(404, f"expected {SESSION} to name a conversation that is open")
        question = _question(body, session)
        return line.fail(question) if isinstance(question, str) else line.ask(question)


def _question(body: bytes, session: str) -> Question | str:
    """What a request asks for, or what is expected instead."""
    try:
        asked = json.loads(body)
        token_ids, sampling = asked["token_ids"], asked.get("sampling_params") or {}
        unknown = sorted(set(asked) - KNOWN)
        steers = sorted({name for name, value in sampling.items() if value is not None} - OURS)
        stops = frozenset(sampling.get("stop_token_ids") or ())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return f"a JSON object with token_ids and sampling_params, got {type(error).__name__}: {error}"
    if not isinstance(token_ids, list) or not token_ids or not all(type(token) is int for token in token_ids):
        return f"token_ids to be a list of integers, got {token_ids!r:.200}"
    if unknown:
        return f"a request for text alone, got {', '.join(unknown)}: images and the like have no token ids of ours"
    if steers:
        return (
            f"a program that leaves sampling to the run, got {', '.join(steers)}: leave it out of the agent's "
            "sampling, since sampling=, max_turns= and max_turn_tokens= of the module are what counts"
        )
    return Question(token_ids=tuple(token_ids), session=session, stop_token_ids=stops)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A thread for each request."""

    daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.threads: set[threading.Thread] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: whoever is gone needs no answer, and standard error is not the place for it."""


class _Handler(BaseHTTPRequestHandler):
    """One request on a connection of its own."""

    timeout = PATIENCE

    @property
    def _endpoint_server(self) -> _Server:
        return cast(_Server, self.server)

    @override
    def handle(self) -> None:
        self._endpoint_server.threads.add(threading.current_thread())
        try:
            super().handle()
        finally:
            self._endpoint_server.threads.discard(threading.current_thread())

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY:
            self._send(Reply.error(413, f"expected a body of at most {MAX_BODY} bytes, and its length"))
            return
        body = self.rfile.read(int(length))
        self._send(self._endpoint_server.endpoint.serve(self.path, self.headers, body))

    def do_GET(self) -> None:
        self._send(self._endpoint_server.endpoint.serve("", self.headers, b""))

    def _send(self, reply: Reply) -> None:
        data = json.dumps(reply.body).encode()
        with contextlib.suppress(OSError):  # it may have gone
            self.send_response(reply.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: requests are the conversation's to record."""
