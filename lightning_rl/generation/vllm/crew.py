"""A crew: threads for the requests of several askers, of which the ones with the lowest rank go first."""

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lightning_rl.generation.vllm.http import Cancelled


class Crew:
    """Threads that take the first of what waits: that of the lowest rank, and of equal ones that which came first.

    Args:
        threads: how many at most; each is started when there is something for it to do.
    """

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="request")
        self._lock, self._numbers, self._closed = threading.Lock(), itertools.count(), False
        self._waiting: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []

    def submit(self, rank: int, call: Callable[[], Any]) -> "Future[Any]":
        """Has a call made. A future that is cancelled before its turn has come is left out.

        Raises:
            Cancelled: after :meth:`close`.
        """
        future = Future[Any]()
        with self._lock:
            if self._closed:
                raise Cancelled("the request was cut short before it was sent")
            self._threads.submit(self._make_first)
            heapq.heappush(self._waiting, (rank, next(self._numbers), future, call))
        return future

    def _make_first(self) -> None:
        with self._lock:
            *_, future, call = heapq.heappop(self._waiting)
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  raised where the future is read
            future.set_exception(error)
        else:
            future.set_result(result)

    def close(self) -> None:
        """Waits for the calls that were submitted; there are no others afterwards."""
        with self._lock:
            self._closed = True
        self._threads.shutdown()
