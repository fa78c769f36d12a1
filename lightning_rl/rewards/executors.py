"""Executors: calls of a reward function by workers that somebody else keeps: threads, processes, other machines."""

import traceback
import uuid
from collections.abc import Collection
from concurrent.futures import Executor, Future
from functools import lru_cache
from typing import Any

import cloudpickle

from lightning_rl.rewards.pool import Answer, Task
from lightning_rl.rewards.worker import answer

LOADED = 16  # functions that a worker keeps


class ExecutorPool:
    """Does tasks by an executor, which stays its owner's: nothing of it is ended here.

    Args:
        function: pickled.
        executor: whose workers can import this library.
    """

    def __init__(self, function: bytes, executor: Executor) -> None:
        self.function, self.executor = function, executor
        self._running: dict[Task, Future[bytes]] = {}

    def submit(self, task: Task) -> None:
        """Has a task done by a worker of the executor."""
        try:
            future: Any = self.executor.submit(call, self.function, task.payload, uuid.uuid4().hex)
            if not isinstance(future, Future):
                raise TypeError(f"its submit() returned no Future, but {type(future).__name__}")
        except Exception as error:  # noqa: BLE001  one that is shut down or broken, each kind by an error of its own
            task.answer.set_result(Answer("lost", f"could not be given to its executor: {error!r:.500}"))
            return
        self._running[task] = future
        future.add_done_callback(lambda done: self._settle(task, done))

    def grow(self, seconds: float) -> None:
        """Adds no worker, which is for the owner to do."""

    def abandon(self, tasks: Collection[Task]) -> None:
        """Ends tasks; what a worker is at already, it may go on with, and nobody takes it."""
        for task in tasks:
            task.answer.cancel()
            if (future := self._running.pop(task, None)) is not None:
                future.cancel()

    def close(self) -> None:
        """Ends what is left undone."""
        self.abandon(list(self._running))

    def pids(self) -> list[int]:
        """None: its workers are not of this process."""
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
    except Exception as error:  # noqa: BLE001  whatever is no answer of ours fails to be read in a way of its own
        return Answer("lost", f"got from its executor what no worker of this library says: {error!r:.500}")
    return said


def call(function: bytes, task: bytes, name: str) -> bytes:
    """What a worker does.

    Args:
        function: pickled.
        task: the pickled arguments.
        name: of the task alone, so that no executor takes it for another one with the same arguments, such as one that
            was cancelled.

    Returns:
        An :class:`Answer`, pickled.
    """
    del name
    try:
        reward = _load(function)
    except BaseException:  # noqa: BLE001  the boundary to foreign code
        return cloudpickle.dumps(("lost", f"could not be loaded in a worker: {traceback.format_exc()}", "", ()))
    return answer(reward, task)


@lru_cache(LOADED)
def _load(function: bytes) -> Any:
    """A function, once for each worker process, where it keeps what it keeps from call to call."""
    return cloudpickle.loads(function)
