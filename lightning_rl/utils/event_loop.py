"""EventLoop: coroutines in a background thread, for callers with or without a running loop."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Value = TypeVar("Value")


class EventLoop:
    """One loop per process, started at the first call and never closed, so its connections stay usable.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loops: dict[
            int, asyncio.AbstractEventLoop
        ] = {}  # by process id, because a fork has no threads of its parent
        self._lock = threading.Lock()

    @property
    def is_current(self) -> bool:
        """True in the thread of this loop, which must not wait for it."""
        return threading.current_thread().name == self._thread_name()

    def start(self, coroutine: Coroutine[Any, Any, Value]) -> "Future[Value]":
        """Schedule a coroutine, and return its future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop())

    def run(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        """Return the result of a coroutine, or raise its error; an interrupt cancels it.

        Raises:
            RuntimeError: If called in the thread of the loop.
        """
        if self.is_current:
            coroutine.close()
            raise RuntimeError(f"expected a thread other than that of {self._name}, got that one: await it instead")
        future = self.start(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Schedule a call of a function in the loop."""
        self._loop().call_soon_threadsafe(function)

    def _thread_name(self) -> str:
        return f"{self._name} of {os.getpid()}"

    def _loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            loop = self._loops.get(os.getpid())
            if loop is None:
                loop = self._loops[os.getpid()] = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(loop,), name=self._thread_name(), daemon=True).start()
            return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop without end; SystemExit of a coroutine reaches its future, and the loop continues."""
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            continue
        return
