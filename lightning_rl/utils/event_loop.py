"""EventLoop: coroutines in a background thread, for callers with or without a running loop."""

import asyncio
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

Value = TypeVar("Value")

BLOCKED_SECONDS = 1.0  # after which a loop that does not answer is blocked


class EventLoop:
    """One loop per process, started at the first call and never closed, so its connections stay usable.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: dict[int, _LoopThread] = {}  # by process id, because a fork has no threads of its parent
        self._lock = threading.Lock()

    @property
    def is_current(self) -> bool:
        """True in the thread of this loop, which must not wait for it."""
        return threading.current_thread().name == self._thread_name()

    def start(self, coroutine: Coroutine[Any, Any, Value]) -> "Future[Value]":
        """Schedule a coroutine, and return its future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._thread().loop)

    def run(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        """Return the result of a coroutine, or raise its error; an interrupt cancels it.

        Raises:
            RuntimeError: If called in the thread of the loop.
        """
        if self.is_current:
            coroutine.close()
            raise RuntimeError(f"expected a thread other than that of {self._name}, got that one: await it instead")
        failed, tasks = threading.Event(), list[asyncio.Task[Any] | None]()

        async def run() -> Value:
            if failed.is_set():
                coroutine.close()
                raise asyncio.CancelledError
            tasks.append(asyncio.current_task())
            return await coroutine

        def cancel() -> None:
            for task in filter(None, tasks):
                task.cancel()

        try:
            return self.start(run()).result()
        except BaseException:  # perhaps of a signal, which may come while start has not returned
            failed.set()
            self.call_soon(cancel)
            raise

    def call_soon(self, function: Callable[[], object]) -> None:
        """Schedule a call of a function in the loop."""
        self._thread().loop.call_soon_threadsafe(function)

    def find_block(self) -> str:
        """Return the stack of code that blocks the loop, or an empty string.

        Until the loop answers again, coroutines start in a new one.
        """
        thread = self._thread()
        thread.answered.clear()
        thread.loop.call_soon_threadsafe(thread.answered.set)
        if thread.answered.wait(BLOCKED_SECONDS):
            return ""
        frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001
        return "".join(traceback.format_stack(frame))

    def _thread_name(self) -> str:
        return f"{self._name} of {os.getpid()}"

    def _thread(self) -> "_LoopThread":
        with self._lock:
            thread = self._threads.get(os.getpid())
            if thread is None or not thread.answered.is_set():
                thread = self._threads[os.getpid()] = _LoopThread(self._thread_name())
                thread.start()
            return thread


async def run_all(coroutines: Iterable[Coroutine[Any, Any, Value]]) -> list[Value]:
    """Return results in order; after the first failure the other tasks are cancelled and awaited."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class _LoopThread(threading.Thread):
    """Thread that runs an event loop without end."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.loop = asyncio.new_event_loop()
        self.answered = threading.Event()
        self.answered.set()

    def run(self) -> None:
        """Run the loop; an exit or a stop in a coroutine does not end it."""
        while True:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()


REQUESTS = EventLoop("requests")
"""Loop of open samples and of calls of servers; no code of users runs in it."""
