"""HTTP endpoint where programs on this machine request tokens, as from a server of vLLM.

It has one route, ``POST /inference/v1/generate``, on loopback at a free port, and requires a secret. A request goes to
the :class:`Line` of the conversation that its header ``X-Session-ID`` names, and gets the tokens of that conversation.
Token ids go both ways; nothing is sampled here.
"""

import asyncio
import hmac
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from lightning_rl.processes.errors import TIMEOUT, CallError
from lightning_rl.rollout import FinishReason
from lightning_rl.utils.event_loop import EventLoop
from lightning_rl.utils.strict_json import parse_json

SERVING = EventLoop("endpoints")  # apart from the loop of programs, which may block theirs
ROUTE = "/inference/v1/generate"
SESSION = "X-Session-ID"
MAX_BODY = 2**26  # bytes of a request
REQUEST_SECONDS = 60.0  # for the headers of a request after the connection or the last reply, and for its body
SHUTDOWN_SECONDS = 10.0
BACKLOG = 1024  # connections that wait to be accepted
IGNORED = frozenset({"stop_token_ids", "logprobs", "skip_special_tokens", "routed_experts_prompt_start"})
"""Sampling parameters of every request, which do not change the sampled tokens."""
KNOWN = frozenset({"model", "token_ids", "sampling_params", "cache_salt", "priority"})
REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}

Reply = tuple[int, Mapping[str, Any]]
"""Status and body of a response."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """Request for the tokens that follow a prefix.

    Args:
        token_ids: Prefix.
        session: Session that requests them.
        stop_token_ids: Ids that end an answer for the program.
    """

    token_ids: tuple[int, ...]
    session: str = ""
    stop_token_ids: frozenset[int] = frozenset()
    reply: "Future[Reply]" = field(default_factory=Future)

    def answer(self, token_ids: Sequence[int], finish: FinishReason) -> None:
        """Send the sampled tokens, with log-probabilities of 0, as only the trainer needs them."""
        content = [{"token": f"token_id:{token}", "logprob": 0.0} for token in token_ids]
        choice = {
            "index": 0,
            "token_ids": list(token_ids),
            "logprobs": {"content": content},
            "finish_reason": REASONS[finish],
        }
        self._set((200, {"request_id": self.session, "choices": [choice]}))

    def refuse(self, message: str, status: int = 400) -> None:
        """Send an error unless there was a reply."""
        self._set(_error(status, message))

    def _set(self, reply: Reply) -> None:
        if not self.reply.done():
            self.reply.set_result(reply)


class Line:
    """Queue of one conversation: its program sends questions, the conversation waits for them.

    One request at a time: a program that requests two answers at once has a tree, which does not fit into a row.

    Args:
        seconds: Time of the program for the whole conversation; that of the policy is not counted.

    Attributes:
        ended: Event that is set once the program has ended.
    """

    def __init__(self, seconds: float) -> None:
        self.ended = threading.Event()
        self._seconds, self._left = seconds, seconds
        self._inbox: queue.SimpleQueue[Question | BaseException | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: Question | None = None
        self._closed = False

    def ask(self, question: Question) -> None:
        """Pass a question of the program to the conversation."""
        with self._lock:
            if self._closed:
                question.refuse("the conversation has ended", 410)
            elif self._pending is not None and not self._pending.reply.done():
                error = ValueError("expected one request at a time, got a second one before the first was answered")
                question.refuse(str(error))
                self._inbox.put(error)
            else:
                self._pending = question
                self._inbox.put(question)

    def fail(self, error: ValueError) -> None:
        """End the conversation because of an invalid request."""
        self._inbox.put(error)

    def end(self, error: BaseException | None = None) -> None:
        """Signal that the program has ended, with its error."""
        self._inbox.put(error)
        self.ended.set()

    def wait(self) -> Question | None:
        """Return the next question, or None if the program has ended.

        Raises:
            CallError: If the program exceeds its time.
            BaseException: Error of the program, or of an invalid request.
        """
        begin = time.monotonic()
        try:
            question = self._inbox.get(timeout=max(self._left, 0.0))
        except queue.Empty:
            message = f"the program took longer than {self._seconds:g} s for a conversation (timeout)"
            raise CallError(TIMEOUT, message) from None
        finally:
            self._left -= time.monotonic() - begin
        if isinstance(question, BaseException):
            raise question
        return question

    def close(self) -> None:
        """Refuse the pending question and all further ones."""
        with self._lock:
            self._closed = True
            if self._pending is not None:
                self._pending.refuse("the conversation has ended", 410)


class CompletionServer:
    """HTTP server on loopback, until :meth:`close`.

    Attributes:
        url: Base URL.
        secret: Bearer token that every request needs.
    """

    def __init__(self) -> None:
        self.secret = secrets.token_urlsafe(32)
        self._lines: dict[str, Line] = {}
        application = web.Application(client_max_size=MAX_BODY)
        application.router.add_route("*", "/{path:.*}", self.serve)
        limits = {"shutdown_timeout": SHUTDOWN_SECONDS, "keepalive_timeout": REQUEST_SECONDS}
        self._runner = web.AppRunner(application, access_log=None, **limits)
        self.url = SERVING.run(self._start())

    async def _start(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=BACKLOG).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def connect(self, session: str, line: Line) -> None:
        """Route the requests of a session to a line."""
        self._lines[session] = line

    def disconnect(self, line: Line) -> None:
        """Remove the sessions of a line."""
        for session in [session for session, other in list(self._lines.items()) if other is line]:
            del self._lines[session]

    def close(self) -> None:
        """Refuse the pending requests and end the server."""
        for line in list(self._lines.values()):
            line.close()
        SERVING.run(self._runner.cleanup())

    async def serve(self, request: web.Request) -> web.Response:
        """Answer a request."""
        status, body = await self._reply(request)
        return web.json_response(body, status=status)

    async def _reply(self, request: web.Request) -> Reply:
        token = request.headers.get("Authorization", "")
        if not hmac.compare_digest(token.encode(), f"Bearer {self.secret}".encode()):
            return _error(401, "expected the secret of the run as bearer token")
        if request.path != ROUTE:
            return _error(404, f"expected {ROUTE}")
        session = request.headers.get(SESSION, "")
        line = self._lines.get(session)
        if line is None:
            return _error(404, f"expected {SESSION} to name a conversation that is open")
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                body = await request.read()
        except TimeoutError:
            return _error(408, f"expected the body of a request within {REQUEST_SECONDS:g} s")
        try:
            question = _question(body, session)
        except ValueError as error:
            line.fail(error)
            return _error(400, str(error))
        line.ask(question)
        return await asyncio.wrap_future(question.reply)


def _error(status: int, message: str) -> Reply:
    return status, {"error": {"message": message, "code": status}}


def _question(body: bytes, session: str) -> Question:
    """Return the question of a request.

    Raises:
        ValueError: If it is none that a conversation can answer.
    """
    try:
        asked = parse_json(body)
        token_ids, sampling = asked["token_ids"], asked.get("sampling_params") or {}
        unknown = sorted(set(asked) - KNOWN)
        changed = sorted({name for name, value in sampling.items() if value is not None} - IGNORED)
        stops = frozenset(sampling.get("stop_token_ids") or ())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"expected a JSON object with token_ids and sampling_params, got {type(error).__name__}: {error}"
        ) from error
    if not isinstance(token_ids, list) or not token_ids or not all(type(token) is int for token in token_ids):
        raise ValueError(f"expected token_ids to be a list of integers, got {token_ids!r:.200}")
    if unknown:
        raise ValueError(f"expected a request for text alone, got {', '.join(unknown)}: images are not supported")
    if changed:
        raise ValueError(
            f"expected a program that leaves sampling to the run, got {', '.join(changed)}: leave it out of the "
            "agent's sampling; sampling= and Conversations(max_turns=, max_turn_tokens=) of the module apply"
        )
    return Question(token_ids=tuple(token_ids), session=session, stop_token_ids=stops)
