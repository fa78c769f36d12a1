"""Coroutines: an event loop in a thread of its own, so that whoever calls may have a loop running or none.

One loop for the whole process: what a coroutine made in one turn, such as a connection, still works in the next.
"""

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Raised:
    """What a coroutine raised instead of returning.

    Args:
        error: may be a ``SystemExit`` too, which would end the loop for everybody if it went on.
    """

    error: BaseException


def gather(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """Awaits all together; the results in their order, a :class:`Raised` where one raised.

    Raises:
        RuntimeError: if a coroutine of the same loop asks for it, which would wait for itself.
    """
    if not awaitables:
        return []
    loop = _loop()
    if threading.current_thread().name == _name():
        for awaitable in awaitables:
            getattr(awaitable, "close", lambda: None)()
        raise RuntimeError("expected a thread without the loop of async tools, got that loop: await the tool instead")
    return asyncio.run_coroutine_threadsafe(_all(awaitables), loop).result()


def start(coroutine: Coroutine[Any, Any, Value]) -> "Future[Value]":
    """Has a coroutine run in the loop; whoever asks goes on."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())


def result_of(value: Any) -> Any:
    """A value, or what an awaitable gives; what it raises is raised here."""
    if not inspect.isawaitable(value):
        return value
    (result,) = gather([value])
    if isinstance(result, Raised):
        raise result.error
    return result


async def _all(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*[_catch(one) for one in awaitables])


async def _catch(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except BaseException as error:  # noqa: BLE001  as Raised says
        return Raised(error)


_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}
_LOCK = threading.Lock()


def _name() -> str:
    return f"async tools of {os.getpid()}"


def _loop() -> asyncio.AbstractEventLoop:
    """The loop of this process; a forked one has none of its parent's threads, so it gets its own."""
    with _LOCK:
        loop = _LOOPS.get(os.getpid())
        if loop is None:
            loop = _LOOPS[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(loop,), name=_name(), daemon=True).start()
        return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Runs a loop for good: a coroutine that exits has its own future told so, and ends nobody else's."""
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            continue
        return
