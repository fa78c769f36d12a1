"""Event loop for the coroutines of reward functions; one per process, in a separate thread.

Clients keep connections that belong to their loop, so the loop outlives a rollout. The thread keeps it independent of
the caller's loop, such as a notebook's.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from typing import Any

from lightning_rl.rewards.timeouts import RewardTimeoutError

GRACE = 1.0  # seconds for a cancelled coroutine to end


class Loop:
    """Event loop in a separate thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, awaitable: Awaitable[Any]) -> "Future[Any]":
        """Schedule an awaitable and return its future."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(_await(awaitable), self._loop)

    def collect(self, futures: "Sequence[Future[Any]]", seconds: float | None) -> list[Any]:
        """Return the result or exception of each future; a TimeoutError for a time-out.

        A coroutine that blocks the loop also fails the others, and later calls get a new loop.
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
    """A coroutine raised SystemExit or KeyboardInterrupt, which would end the loop."""


async def _await(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:  # Ctrl-C is raised in the main thread, never here
        raise ExitError(repr(error)) from error


def _outcome(future: "Future[Any]", seconds: float | None) -> Any:
    try:
        return future.result(seconds)
    except (KeyboardInterrupt, SystemExit, RewardTimeoutError):  # raised in this thread
        raise
    except BaseException as error:  # noqa: BLE001  the boundary to foreign code
        return error
