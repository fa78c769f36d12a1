"""Processes of a worker on a node of a Ray cluster."""

import os
import sys
from typing import Any

from lightning_rl.processes.errors import CallError
from lightning_rl.processes.pool import Pool, Worker


class RayHost:
    """Processes on a node, one of each pool that uses it.

    Its methods run in order, except those that the trainer calls in the concurrency group "watch".
    """

    def __init__(self) -> None:
        self._variables, self._pools, self._held = set(os.environ), dict[int, Pool](), list[tuple[Pool, Worker]]()

    def ask(self, key: int, options: Any, task: bytes, seconds: float, *, new: bool) -> Any:
        """Return the pickled reply, or the arguments of its :class:`CallError`, to a task of a (``new``) lease.

        Args:
            key: Name of the pool.
            options: Options of the pool if it is new.
            task: Pickled arguments and keywords; empty to load the function alone.
            seconds: Time limit.
            new: True for the first task of a lease.
        """
        if key not in self._pools:
            function, memory, environment, path, variables = options
            sys.path[:] = dict.fromkeys([*path, *sys.path])
            os.environ.update({name: variables[name] for name in variables if name not in self._variables})
            self._pools[key] = Pool(function, processes=1, memory=memory, environment=environment)
        try:
            if new:
                self.release(keep=True)
                self._held = [(self._pools[key], self._pools[key].lease())]
            return self._held[0][1].exchange(task, seconds) if task else b""
        except CallError as error:
            return error.kind, error.message, error.log, error.error

    def release(self, *, keep: bool) -> None:
        """Return the process of the last lease to its pool, or end it."""
        while self._held:
            pool, process = self._held.pop()
            pool.release(process, keep=keep and not process.killed)

    def pids(self, key: int) -> list[int]:
        """Return the ids of the processes of a pool."""
        return self._pools[key].pids()

    def close(self, key: int) -> None:
        """End the processes of a pool."""
        self._pools[key].close()
