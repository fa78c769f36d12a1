"""EventLoop: coroutines in a thread of their own, so that whoever calls may have a loop running or none."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Value = TypeVar("Value")


class EventLoop:
    """One loop for the whole process, from the first call on: a connection that was opened in it works until the end.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process; a forked one has no thread of its parent's
        self._lock = threading.Lock()

    @property
    def is_current(self) -> bool:
        """Whether the caller is in this loop, and so must not wait for it."""
        return threading.current_thread().name == self._thread_name()

    def start(self, coroutine: Coroutine[Any, Any, Value]) -> "Future[Value]":
        """Has a coroutine run; whoever asks goes on."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop())

    def run(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        """What a coroutine returns or raises; it is cancelled if whoever waits is interrupted.

        Raises:
            RuntimeError: in the loop itself, which would wait for itself.
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
        """Has a function called in the loop."""
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
    """Runs a loop for good: a coroutine that exits has its own future told so, and ends nobody else's."""
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            continue
        return
