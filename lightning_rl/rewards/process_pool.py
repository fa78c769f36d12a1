"""Pool of processes that call one reward function; replaces processes that hang or die."""

import contextlib
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from signal import Signals
from typing import Any, NamedTuple

import cloudpickle

STUCK = 4.0  # multiple of the longest task so far
FAREWELL = 2.0  # seconds for a process to exit after it closed its pipe
STARTUP_SECONDS = 120.0  # to load the function
WORKER = Path(__file__).with_name("worker.py")


class Answer(NamedTuple):
    """Result of a task.

    Attributes:
        kind: ``"returned"``, ``"raised"`` or ``"lost"``.
        value: Returned value, or the cause of the failure.
        detail: Logged columns, or the traceback.
        metrics: Logged numbers.
    """

    kind: str
    value: Any
    detail: Any = ""
    metrics: Any = ()


@dataclass(slots=True, eq=False)
class Task:
    """Call to make.

    Attributes:
        payload: Pickled arguments.
        seconds: Time limit, from the moment a process receives the task.
        answer: Future of the result.
    """

    payload: bytes
    seconds: float
    answer: "Future[Answer]" = field(default_factory=Future)


class Pool:
    """Threads that each feed one process.

    Args:
        function: Pickled reward function.
        processes: Maximum number of processes, unless all hang.
        max_processes: Maximum number of processes while some hang.
        memory: Address space of each process in bytes; None for no limit.
        environment: Environment variables of the processes, added to those of the trainer.
    """

    def __init__(
        self,
        function: bytes,
        *,
        processes: int,
        max_processes: int,
        memory: int | None,
        environment: Mapping[str, str],
    ) -> None:
        self.setup = {"path": list(sys.path), "memory": memory, "function": function}
        self.environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment}
        self.processes, self.max_processes = processes, max_processes
        self.failure = ""  # reason why no process can start
        self.longest = 0.0  # seconds of the longest finished task
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._hands: dict[threading.Thread, _Process] = {}
        self._lock = threading.Lock()
        self._open = True

    def submit(self, task: Task) -> None:
        """Queue a task for the next free process."""
        self._tasks.put(task)
        with self._lock:
            if len(self._hands) < self.processes:
                self._add()

    def grow(self, seconds: float) -> None:
        """Double the processes if tasks are waiting and every process seems to hang.

        Args:
            seconds: Minimum duration of a hanging task; it must also be much longer than any finished task.
        """
        with self._lock:
            latest = time.monotonic() - max(seconds, STUCK * self.longest)
            stuck = all(0 < process.since < latest for process in self._hands.values())
            if self._open and stuck and not self._tasks.empty():
                number = len(self._hands)
                for _ in range(min(number, self.max_processes - number)):
                    self._add()

    def abandon(self, tasks: Collection[Task]) -> None:
        """Cancel tasks and kill the processes that run them."""
        for task in tasks:
            task.answer.cancel()
        with self._lock:
            busy = [process for process in self._hands.values() if process.task in tasks]
        for process in busy:
            process.kill()

    def close(self) -> None:
        """End every process; unfinished tasks are lost."""
        with self._lock:
            self._open = False
            hands = dict(self._hands)
        for process in hands.values():
            process.kill()
            self._tasks.put(None)
        for hand in hands:
            hand.join(10.0)
        with contextlib.suppress(queue.Empty):
            while True:
                if (task := self._tasks.get_nowait()) is not None:
                    task.answer.cancel()

    def pids(self) -> list[int]:
        """Process ids of the guards of the running processes."""
        return [process.popen.pid for process in self._hands.values() if process.popen is not None]

    def _add(self) -> None:
        process = _Process(self.setup, self.environment)
        hand = threading.Thread(target=self._work, args=(process,), name="reward", daemon=True)
        self._hands[hand] = process
        hand.start()

    def _work(self, process: "_Process") -> None:
        while (task := self._next()) is not None:
            if not task.answer.set_running_or_notify_cancel():
                continue
            process.task = task
            answer = process.do(task) if not self.failure else Answer("lost", self.failure)
            self.failure = self.failure or process.failure
            self.longest = max(self.longest, process.seconds if answer.kind != "lost" else 0.0)
            process.task = None
            task.answer.set_result(answer)
        process.end()
        with self._lock:
            self._hands.pop(threading.current_thread(), None)

    def _next(self) -> Task | None:
        """Return the next task; None for a surplus thread or a closed pool."""
        with self._lock:
            extra = len(self._hands) > self.processes
        try:
            return self._tasks.get(block=not extra) if self._open else None
        except queue.Empty:
            return None


class _Process:
    """Worker process, started on demand."""

    def __init__(self, setup: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.setup, self.environment = setup, environment
        self.popen: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None
        self.life = -1
        self.since = 0.0  # start of its task; 0 without one, infinity until the process is ready
        self.seconds = 0.0  # duration of its last task
        self.failure = ""
        self.task: Task | None = None
        self._lock = threading.Lock()

    def do(self, task: Task) -> Answer:
        """Run a task, in a new process if there is none."""
        self.since = math.inf
        try:
            connection = self.connection or self._start()
            self.since = time.monotonic()
            connection.send_bytes(task.payload)
            if not connection.poll(task.seconds):
                self.end()
                return Answer("lost", f"took longer than {task.seconds:g} s")
            return Answer(*cloudpickle.loads(connection.recv_bytes()))
        except (EOFError, OSError, TypeError):  # either end of the pipe is closed
            return Answer("lost", self.failure or self._death())
        finally:
            self.seconds, self.since = time.monotonic() - self.since, 0.0

    def _start(self) -> Connection:
        here, there = Pipe()
        life, self.life = os.pipe()
        command = [sys.executable, str(WORKER), str(there.fileno()), str(life)]
        self.popen = subprocess.Popen(
            command,
            pass_fds=(there.fileno(), life),
            env=dict(self.environment),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        there.close()
        os.close(life)
        self.connection = here
        here.send(self.setup)
        if not here.poll(STARTUP_SECONDS):
            self.failure = f"could not be loaded in a process within {STARTUP_SECONDS:g} s"
        elif message := here.recv():
            self.failure = f"could not be loaded in a process: {message}"
        if self.failure:
            self.end()
            raise EOFError
        return here

    def _death(self) -> str:
        """Wait for the exit of the process and return the cause."""
        popen = self.popen
        if popen is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(FAREWELL)  # let it exit by itself before the kill
        self.end()
        code = None if popen is None else popen.returncode
        if code is not None and code > 128:
            return f"lost its process to {Signals(code - 128).name}"
        return f"lost its process, which exited with status {code}"

    def kill(self) -> None:
        """Tell the guard to kill the process and its descendants; callable from any thread."""
        with self._lock:
            life, self.life = self.life, -1
        if life >= 0:
            os.close(life)

    def end(self) -> None:
        """Kill the process and its descendants, and wait for the exit."""
        self.kill()
        popen, connection = self.popen, self.connection
        self.popen = self.connection = None
        if connection is not None:
            connection.close()
        if popen is not None:
            try:
                popen.wait(10.0)
            except subprocess.TimeoutExpired:
                popen.kill()
                popen.wait()
