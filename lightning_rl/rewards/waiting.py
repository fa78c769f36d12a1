"""Waiting: coroutines of reward functions, all at once, in one event loop that lives as long as the process.

One loop, and not one for each rollout, because clients keep connections that belong to the loop they were opened in. It
runs in a thread of its own, so that a caller's loop, such as a notebook's, does not matter.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from typing import Any

from lightning_rl.rewards.limit import TimeUpError

GRACE = 1.0  # seconds that a cancelled coroutine has to give up


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, awaitable: Awaitable[Any]) -> "Future[Any]":
        """Starts to await something."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(_await(awaitable), self._loop)

    def collect(self, futures: "Sequence[Future[Any]]", seconds: float | None) -> list[Any]:
        """What each came to: its result, or the exception that it raised; a TimeoutError if it took too long.

        A coroutine that blocks the loop instead of awaiting costs the others too, and the next ones get another loop.
        """
        end = None if seconds is None else time.monotonic() + seconds
        outcomes = [_outcome(future, None if end is None else max(end - time.monotonic(), 0.0)) for future in futures]
        late = [future for future in futures if not future.done()]
        for future in late:
            future.cancel()
        if late and not self._is_alive():
            self._loop = None
        return outcomes

    def _is_alive(self) -> bool:
        if self._loop is None:
            return False
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        return answered.wait(GRACE)


LOOP = Loop()


class ExitError(RuntimeError):
    """A coroutine raised what ends a program, such as SystemExit, and would have ended the loop with it."""


async def _await(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:  # Ctrl-C is raised in the main thread, never here
        raise ExitError(repr(error)) from error


def _outcome(future: "Future[Any]", seconds: float | None) -> Any:
    try:
        return future.result(seconds)
    except (KeyboardInterrupt, SystemExit, TimeUpError):  # of this thread
        raise
    except BaseException as error:  # noqa: BLE001  the boundary to foreign code
        return error
