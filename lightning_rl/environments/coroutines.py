"""Coroutines: one loop for all tools, so that what one made in one turn, such as a connection, works in the next."""

import asyncio
import inspect
from collections.abc import Awaitable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_rl.event_loop import EventLoop

Value = TypeVar("Value")
LOOP = EventLoop("async tools")


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
    if LOOP.is_current:
        for awaitable in awaitables:
            getattr(awaitable, "close", lambda: None)()
        raise RuntimeError("expected a thread without the loop of async tools, got that loop: await the tool instead")
    return LOOP.run(_all(awaitables))


def start(coroutine: Coroutine[Any, Any, Value]) -> "Future[Value]":
    """Has a coroutine run in the loop; whoever asks goes on."""
    return LOOP.start(coroutine)


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
