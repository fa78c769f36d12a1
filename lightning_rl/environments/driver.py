"""Drivers that advance conversations with one engine.

Samples do not depend on the driver: each seed belongs to (sample, turn).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, Self

from lightning_rl.environments.conversation import Conversation
from lightning_rl.generation import Completion, Engine, Request
from lightning_rl.generation.validate_completions import Answers
from lightning_rl.samples import Trajectory
from lightning_rl.utils.arguments import check_counts


def converse(
    conversations: Sequence[Conversation],
    engine: Engine,
    *,
    logprobs: bool = False,
    answers: Answers | None = None,
    executor: Executor | None = None,
    limit: int | None = None,
) -> list[Trajectory]:
    """Advance conversations until all have ended, on the schedule of the engine; see :meth:`Engine.converse`.

    Every rank that shares an engine has to call it, even without conversations.

    Args:
        conversations: Conversations that have not begun.
        engine: Engine that generates.
        logprobs: True if each token needs a log-probability.
        answers: Checks of the engine's completions; None for no checks.
        executor: Threads that run environments in parallel; None for the thread that has the completion.
        limit: Maximum number of open conversations; None for all.

    Returns:
        The trajectories, in the order of ``conversations``.

    Raises:
        EngineError: If the engine fails or a check does. Environments are closed then.
        ValueError: If ``limit`` is not positive.
    """
    with _Conversations(conversations, answers, executor, limit) as exchange:
        engine.converse(exchange, logprobs=logprobs)
        return exchange.trajectories()


class _Conversations:
    """Conversations as an :class:`~lightning_rl.generation.engine.Exchange`, closed if the block raises."""

    def __init__(
        self,
        conversations: Sequence[Conversation],
        answers: Answers | None,
        executor: Executor | None,
        limit: int | None,
    ) -> None:
        check_counts(1, optional=True, limit=limit)
        self._all, self._waiting = conversations, deque(conversations)
        self._answers, self._executor = answers, executor
        self._limit = len(conversations) if limit is None else limit
        self._changed = threading.Condition()
        self._ready: list[Conversation] = []  # have a request to take
        self._drawing: dict[tuple[int, int, int, int], Conversation] = {}  # by Request.key
        self._busy: set[Conversation] = set()  # their environments are running
        self._failure: BaseException | None = None
        self._abandoned = False

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close every environment after an error; running ones are closed when they return."""
        if kind is None:
            return
        with self._changed:
            self._abandoned = True
            idle = [conversation for conversation in self._all if conversation not in self._busy]
        for conversation in idle:
            conversation.abandon()

    def take(self, *, wait: bool = True, linger: float = 0.0) -> list[Request]:
        """Return the requests of all conversations that have one; see :meth:`Exchange.take`."""
        end: float | None = None
        while True:
            self._open()
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                if self._ready and end is None:
                    end = time.monotonic() + linger
                if self._has_room():
                    continue  # a new conversation has ended already
                if not wait or not (self._busy or (self._drawing and not self._ready)):
                    return self._hand_out()
                if end is not None and time.monotonic() >= end:
                    return self._hand_out()
                self._changed.wait(None if end is None else min(end - time.monotonic(), threading.TIMEOUT_MAX))

    def _hand_out(self) -> list[Request]:
        """Return the requests that are ready, ordered by sample."""
        asked = [(each.request, each) for each in self._ready if each.request is not None]
        asked.sort(key=lambda pair: pair[0].sample_id)
        self._ready = []
        self._drawing |= {request.key: conversation for request, conversation in asked}
        requests = [request for request, _ in asked]
        if self._answers is not None:
            self._answers.ask(requests)
        return requests

    def give(self, request: Request, completion: Completion) -> None:
        """Run the environment on a completion, here or in the executor; see :meth:`Exchange.give`."""
        if self._answers is not None:
            completion = self._answers.check(request, completion)
        with self._changed:
            conversation = self._drawing.pop(request.key)
            conversation.pairs.append((request, completion))
            self._busy.add(conversation)
        self._run(conversation, conversation.receive, completion)

    def fail(self, error: BaseException) -> None:
        """Make the next :meth:`take` raise the first of several errors."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return bool(self._waiting) and len(self._busy) + len(self._drawing) + len(self._ready) < self._limit

    def _open(self) -> None:
        """Begin conversations up to the limit."""
        while True:
            with self._changed:
                if self._abandoned or not self._has_room():
                    return
                conversation = self._waiting.popleft()
                self._busy.add(conversation)
            self._run(conversation, conversation.begin)

    def _run(self, conversation: Conversation, move: Callable[..., None], *arguments: Any) -> None:
        if self._executor is None:
            self._move(conversation, move, *arguments)
        else:
            self._executor.submit(self._move, conversation, move, *arguments)

    def _move(self, conversation: Conversation, move: Callable[..., None], *arguments: Any) -> None:
        try:
            if not self._abandoned:
                move(*arguments)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            with self._changed:
                self._busy.discard(conversation)
                abandoned = self._abandoned
                if conversation.request is not None and not abandoned:
                    self._ready.append(conversation)
                self._changed.notify_all()
            if abandoned:
                conversation.abandon()

    def trajectories(self) -> list[Trajectory]:
        """Return the conversations that have ended."""
        if self._answers is not None:
            self._answers.close()
        ended = [conversation.trajectory for conversation in self._all]
        found = [trajectory for trajectory in ended if trajectory is not None]
        if len(found) < len(ended):
            raise RuntimeError("expected a conversation that has ended, got one that waits")
        return found
