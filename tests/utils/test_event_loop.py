"""Event loop in a thread: an interrupt of its caller cancels the coroutine at any time."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

import pytest
from typing_extensions import override

from lightning_rl.utils.event_loop import EventLoop


class Interrupted(EventLoop):
    """Loop whose caller gets a signal once the coroutine is scheduled, at once or after it began."""

    wait = False

    @override
    def start(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        super().start(coroutine)
        assert not self.wait or BEGAN.wait(20)
        raise KeyboardInterrupt


BEGAN = threading.Event()


@pytest.mark.parametrize("wait", [False, True])
def test_an_interrupt_while_a_coroutine_is_scheduled_cancels_it(wait: bool) -> None:
    loop, finished, ended = Interrupted("interrupted"), threading.Event(), list[str]()
    loop.wait = wait
    BEGAN.clear()

    async def work() -> None:
        BEGAN.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(KeyboardInterrupt):
        loop.run(work())

    async def later() -> None:
        finished.set()

    EventLoop.start(loop, later())
    assert finished.wait(20)
    assert ended == (["cancelled"] if BEGAN.is_set() else [])
