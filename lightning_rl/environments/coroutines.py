"""One event loop for all tools, so that objects such as connections remain usable in later turns."""

import asyncio
import inspect
from collections.abc import Awaitable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_rl.utils.event_loop import EventLoop

Value = TypeVar("Value")
LOOP = EventLoop("async tools")


@dataclass(frozen=True, slots=True)
class Raised:
    """Exception of a coroutine.

    Args:
        error: Exception, which may be a ``SystemExit`` that would end the loop.
    """

    error: BaseException


def gather(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """Await all together and return the results in order, with a :class:`Raised` for each exception.

    Raises:
        RuntimeError: If called in the thread of the loop, which would wait for itself.
    """
    if not awaitables:
        return []
    if LOOP.is_current:
        for awaitable in awaitables:
            getattr(awaitable, "close", lambda: None)()
        raise RuntimeError("expected a thread without the loop of async tools, got that loop: await the tool instead")
    return LOOP.run(_all(awaitables))


def start(coroutine: Coroutine[Any, Any, Value]) -> "Future[Value]":
    """Start a coroutine in the loop."""
    return LOOP.start(coroutine)


def result_of(value: Any) -> Any:
    """Return a value, or the result of an awaitable, and raise its exception."""
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
    except BaseException as error:  # noqa: BLE001  see Raised
        return Raised(error)
