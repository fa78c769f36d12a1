"""Driver that advances conversations with one engine.

Samples do not depend on the schedule: each seed belongs to (sample, turn).
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from lightning_rl.environments.conversation import Conversation
from lightning_rl.environments.program import ProgramConversation
from lightning_rl.generation import Engine
from lightning_rl.generation.sessions import Session
from lightning_rl.generation.validate_completions import Answers
from lightning_rl.samples import Trajectory
from lightning_rl.utils.arguments import check_counts

AnyConversation = Conversation | ProgramConversation


def converse(
    conversations: Sequence[AnyConversation],
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
        executor: Threads that run environments in parallel; None for those of the engine.
        limit: Maximum number of open conversations; None for all.

    Returns:
        The trajectories, in the order of ``conversations``.

    Raises:
        EngineError: If the engine fails or a check does. Environments are closed then.
        ValueError: If ``limit`` is not positive.
    """
    check_counts(1, optional=True, limit=limit)
    waiting, moves = iter(conversations), Moves()

    async def episode(session: Session) -> None:
        for conversation in waiting:
            if isinstance(conversation, ProgramConversation):
                await conversation.run(session)
            else:
                await _hold(conversation, session, moves)

    number = len(conversations) if limit is None else min(limit, len(conversations))
    try:
        engine.converse([episode] * number, logprobs=logprobs, answers=answers, executor=executor)
    except BaseException:
        moves.abandon(conversations)
        raise
    if answers is not None:
        answers.close()
    ended = [conversation.trajectory for conversation in conversations]
    found = [trajectory for trajectory in ended if trajectory is not None]
    if len(found) < len(ended):
        raise RuntimeError("expected a conversation that has ended, got one that waits")
    return found


async def _hold(conversation: Conversation, session: Session, moves: "Moves") -> None:
    """Advance a conversation to its end."""
    await session.call(moves.run, conversation, conversation.begin)
    while (request := conversation.request) is not None:
        completion = await session.complete(request)
        conversation.pairs.append((request, completion))
        await session.call(moves.run, conversation, conversation.receive, completion)


class Moves:
    """Calls of conversations, in any thread, until they are abandoned."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: set[AnyConversation] = set()  # their environments are running
        self._abandoned = False

    def run(self, conversation: Conversation, move: Callable[..., None], *arguments: Any) -> None:
        """Call a method of a conversation; close its environment if the conversations were abandoned meanwhile."""
        with self._lock:
            if self._abandoned:
                return
            self._busy.add(conversation)
        try:
            move(*arguments)
        finally:
            with self._lock:
                self._busy.discard(conversation)
                abandoned = self._abandoned
            if abandoned:
                conversation.abandon()

    def abandon(self, conversations: Sequence[AnyConversation]) -> None:
        """Close every environment; running ones are closed when they return."""
        with self._lock:
            self._abandoned = True
            idle = [conversation for conversation in conversations if conversation not in self._busy]
        for conversation in idle:
            conversation.abandon()
