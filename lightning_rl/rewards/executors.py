"""Calls of a reward function by a user's executor: threads, processes or other machines."""

import traceback
import uuid
from collections.abc import Collection
from concurrent.futures import Executor, Future
from functools import lru_cache
from typing import Any

import cloudpickle

from lightning_rl.rewards.process_pool import Answer, Task
from lightning_rl.rewards.process_worker import answer

LOADED = 16  # functions in the cache of a worker


class ExecutorPool:
    """Runs tasks on an executor without closing it.

    Args:
        function: Pickled reward function.
        executor: Executor whose workers can import this library.
    """

    def __init__(self, function: bytes, executor: Executor) -> None:
        self.function, self.executor = function, executor
        self._running: dict[Task, Future[bytes]] = {}

    def submit(self, task: Task) -> None:
        """Submit a task to the executor."""
        try:
            future: Any = self.executor.submit(call, self.function, task.payload, uuid.uuid4().hex)
            if not isinstance(future, Future):
                raise TypeError(f"its submit() returned no Future, but {type(future).__name__}")
        except Exception as error:  # noqa: BLE001  each executor has its own error for shut down or broken
            task.answer.set_result(Answer("lost", f"could not be submitted to its executor: {error!r:.500}"))
            return
        self._running[task] = future
        future.add_done_callback(lambda done: self._settle(task, done))

    def grow(self, seconds: float) -> None:
        """Do nothing: the executor's owner adds workers."""

    def abandon(self, tasks: Collection[Task]) -> None:
        """Cancel tasks; the result of a task that already runs is dropped."""
        for task in tasks:
            task.answer.cancel()
            if (future := self._running.pop(task, None)) is not None:
                future.cancel()

    def close(self) -> None:
        """Cancel the unfinished tasks."""
        self.abandon(list(self._running))

    def pids(self) -> list[int]:
        """Return an empty list: the workers do not belong to this process."""
        return []

    def _settle(self, task: Task, done: "Future[bytes]") -> None:
        self._running.pop(task, None)
        if task.answer.set_running_or_notify_cancel():
            task.answer.set_result(_answer_of(done))


def _answer_of(done: "Future[bytes]") -> Answer:
    if done.cancelled():
        return Answer("lost", "was cancelled by its executor")
    if (error := done.exception()) is not None:
        return Answer("lost", f"lost its worker: {error!r:.500}")
    try:
        said = Answer(*cloudpickle.loads(done.result()))
    except Exception as error:  # noqa: BLE001  invalid bytes may raise anything
        return Answer("lost", f"got an invalid result from its executor: {error!r:.500}")
    return said


def call(function: bytes, task: bytes, name: str) -> bytes:
    """Run one task in a worker and return the pickled :class:`Answer`.

    Args:
        function: Pickled reward function.
        task: Pickled arguments.
        name: Unique name, so that an executor does not reuse the result of a task with equal arguments.
    """
    del name
    try:
        reward = _load(function)
    except BaseException:  # noqa: BLE001  the boundary to foreign code
        return cloudpickle.dumps(("lost", f"could not be loaded in a worker: {traceback.format_exc()}", "", ()))
    return answer(reward, task)


@lru_cache(LOADED)
def _load(function: bytes) -> Any:
    """Load a function once per worker process, which keeps its state between calls."""
    return cloudpickle.loads(function)
