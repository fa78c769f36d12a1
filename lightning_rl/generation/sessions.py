"""One asynchronous way for tokens: open samples await completions, and an engine answers them.

Samples run as coroutines in the event loop of requests. The engine, and environments without threads or worker
processes, run in the thread that called the engine, with its contexts.
"""

import asyncio
import queue
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from lightning_rl.processes.pool import BLOCKED
from lightning_rl.samples import Completion, Request
from lightning_rl.utils.event_loop import REQUESTS

Value = TypeVar("Value")


class Checks(Protocol):
    """Checks of completions, see :class:`.validate_completions.Answers`."""

    def ask(self, requests: Sequence[Request]) -> None:
        """Store requests before the engine receives them."""
        ...

    def check(self, request: Request, given: Completion) -> Completion:
        """Return the completion of a request, or an aborted one if it is faulty."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Request of an open sample that awaits its completion."""

    session: "Session"
    request: Request
    reply: "asyncio.Future[Completion]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def give(self, completion: Completion) -> None:
        """Pass on the completion."""
        if not self.reply.done():
            self.reply.set_result(completion)
            self.session.waits(-1)


class Job:
    """Call of a function in the thread of the engine."""

    __slots__ = ("_error", "_function", "_value", "reply")

    def __init__(self, reply: "asyncio.Future[Any]", function: Callable[[], Any]) -> None:
        self.reply, self._function = reply, function
        self._value: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Call it, unless nothing awaits the result any longer."""
        if self.reply.cancelled():
            return
        try:
            self._value = self._function()
        except Exception as error:  # noqa: BLE001  raised where the result is awaited
            self._error = error

    def settle(self) -> None:
        """Pass on the result or the error, in the event loop."""
        if self.reply.done():
            return
        if self._error is None:
            self.reply.set_result(self._value)
        else:
            self.reply.set_exception(self._error)


class Session:
    """Right of an open sample to request tokens, several at once too."""

    def __init__(self, sessions: "Sessions") -> None:
        self._sessions, self._waiting = sessions, 0

    async def complete(self, request: Request) -> Completion:
        """Return the completion of a request.

        Raises:
            EngineError: If the engine fails, or its completion does not fit the request.
        """
        return await self._sessions.complete(self, request)

    async def call(self, function: Callable[..., Value], *arguments: Any) -> Value:
        """Return the result of a function of an environment, called in the executor or the engine's thread."""
        return await self._sessions.call(function, *arguments)

    def waits(self, number: int) -> None:
        """Add to the number of requests that await a completion, or of calls that await a worker."""
        before, self._waiting = self._waiting > 0, self._waiting + number
        self._sessions.waiting += (self._waiting > 0) - before
        self._sessions.notify()


Episode = Callable[[Session], Coroutine[Any, Any, None]]
"""Samples that are open one after the other."""


class Sessions:
    """Open samples of one call of an engine.

    Args:
        answers: Checks of the engine's completions; None for no checks.
        executor: Threads that run environments in parallel; None for the thread of the engine.

    Attributes:
        waiting: Number of open samples that await a completion or a worker.
    """

    def __init__(self, answers: Checks | None = None, executor: Executor | None = None) -> None:
        self._answers, self._executor = answers, executor
        self._jobs = queue.SimpleQueue[list[Job] | None]()  # of the thread of the engine
        self._next = list[Job]()  # which go there together: a change of threads takes longer than most of them
        self._asked = list[Asked]()  # that the engine has not taken
        self._open, self.waiting, self._calls = 0, 0, 0
        self._answer: Callable[[Request], Coroutine[Any, Any, Completion]] | None = None
        self._failure: BaseException | None = None
        self._changed: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._interrupted = False

    def run(self, serve: Callable[["Sessions"], Coroutine[Any, Any, None]], episodes: Sequence[Episode]) -> None:
        """Run open samples to their end, while ``serve`` answers them; the first error ends all.

        Called by the thread of the engine.
        """
        ended = REQUESTS.start(self._run(serve, episodes))
        try:
            while (jobs := self._jobs.get()) is not None:
                for job in jobs:
                    job.run()
                REQUESTS.call_soon(partial(_settle, jobs))
        except BaseException:  # of a signal
            REQUESTS.call_soon(self._interrupt)
            while self._jobs.get() is not None:
                pass
            raise
        ended.result()

    def _interrupt(self) -> None:
        self._interrupted = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self, serve: Callable[["Sessions"], Coroutine[Any, Any, None]], episodes: Sequence[Episode]) -> None:
        tasks = list[asyncio.Task[None]]()
        try:
            if self._interrupted:
                return
            self._task, self._changed, self._open = asyncio.current_task(), asyncio.Event(), len(episodes)
            tasks += [asyncio.create_task(self._hold(episode)) for episode in episodes]
            await serve(self)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._jobs.put(None)

    async def _hold(self, episode: Episode) -> None:
        session = Session(self)
        BLOCKED.set(lambda number: REQUESTS.call_soon(partial(session.waits, number)))
        try:
            await episode(session)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failure = self._failure or error
            raise
        finally:
            self._open -= 1
            self.notify()

    def notify(self) -> None:
        """Wake the engine after a change."""
        if self._changed is not None:
            self._changed.set()

    async def complete(self, session: Session, request: Request) -> Completion:
        """Return the completion of a request of an open sample; see :meth:`Session.complete`."""
        if self._answers is not None:
            self._answers.ask([request])
        if self._answer is not None:
            completion = await self._answer(request)
        else:
            asked = Asked(session, request)
            self._asked.append(asked)
            session.waits(1)
            try:
                completion = await asked.reply
            except asyncio.CancelledError:
                if asked.reply.cancelled():
                    session.waits(-1)
                    self._asked = [each for each in self._asked if each is not asked]
                raise
        return completion if self._answers is None else self._answers.check(request, completion)

    async def call(self, function: Callable[..., Value], *arguments: Any) -> Value:
        """Return the result of a function of an environment; see :meth:`Session.call`."""
        if self._executor is not None:
            run = copy_context().run
            return await asyncio.get_running_loop().run_in_executor(self._executor, run, function, *arguments)
        self._calls += 1
        try:
            return await self.here(function, *arguments)
        finally:
            self._calls -= 1
            self.notify()

    async def here(self, function: Callable[..., Value], *arguments: Any) -> Value:
        """Return the result of a function, called in the thread of the engine, in order."""
        loop = asyncio.get_running_loop()
        if not self._next:
            loop.call_soon(self._send)
        self._next.append(job := Job(loop.create_future(), partial(function, *arguments)))
        return await job.reply

    def _send(self) -> None:
        jobs, self._next = self._next, []
        self._jobs.put(jobs)

    async def round(self, linger: float) -> list[Asked]:
        """Return the requests of all open samples, ordered by sample; none once no sample is open.

        Waits until every open sample has a request or waits for a worker, but no longer than ``linger`` seconds for
        samples that are busy elsewhere than in the thread of the engine.

        Raises:
            BaseException: First error of a sample.
        """
        end = None
        while True:
            self._raise_failure()
            now = asyncio.get_running_loop().time()
            if self._asked and end is None:
                end = now + linger
            late = self.waiting < self._open and (self._calls or end is None or now < end)
            if not late and (self._asked or not self._open):
                return self.take()
            await self._change(None if end is None or self._calls else end - now)

    async def arrival(self) -> bool:
        """Wait for a request that the engine has not taken; return False once no sample is open."""
        while True:
            self._raise_failure()
            if self._asked or not self._open:
                return bool(self._asked)
            await self._change()

    async def settle(self) -> None:
        """Wait for environments in the thread of the engine, whose next requests come before its next step."""
        await asyncio.sleep(0)
        while self._calls:
            await self._change()

    async def answer_each(self, answer: Callable[[Request], Coroutine[Any, Any, Completion]]) -> None:
        """Answer each request by a coroutine of the engine until no sample is open."""
        self._answer = answer
        while self._open:
            self._raise_failure()
            await self._change()
        self._raise_failure()

    @property
    def has_arrivals(self) -> bool:
        """True if there are requests that the engine has not taken; for any thread."""
        return bool(self._asked) or self._failure is not None

    def take(self) -> list[Asked]:
        """Return the requests that the engine has not taken, ordered by sample and prefix."""
        taken, self._asked = self._asked, []
        return sorted(taken, key=lambda asked: (asked.request.sample_id, asked.request.prefix_ids))

    async def _change(self, seconds: float | None = None) -> None:
        """Wait for a change, at most so long."""
        changed = self._changed
        if changed is None:
            raise RuntimeError("expected sessions that run, got some that have not begun")
        changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await changed.wait()
        except TimeoutError:
            pass

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def give_all(asked: Sequence[Asked], completions: Sequence[Completion]) -> None:
    """Pass on the completions of several requests, in order."""
    for each, completion in zip(asked, completions, strict=True):
        each.give(completion)


def _settle(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.settle()
