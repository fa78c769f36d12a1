"""Pool of processes that call one function; a process that hangs or dies is killed with its children and replaced."""

import contextlib
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from signal import Signals
from typing import Any

EXIT_SECONDS = 2.0  # seconds for a process to exit after it closed its pipe
STARTUP_SECONDS = 120.0  # to load the function
WORKER = Path(__file__).with_name("process_worker.py")


class LostError(RuntimeError):
    """A task has no result; the message is the predicate of "reward x ..."."""


class Pool:
    """Threads that each lease a process, send it a task and wait for the result.

    Processes start on demand, and end with the pool or the trainer. A fork of the trainer starts its own.

    Args:
        function: Pickled function.
        processes: Maximum number of processes.
        memory: Address space of each process in bytes; None for no limit.
        environment: Environment variables of the processes, added to those of the trainer.
    """

    def __init__(
        self,
        function: bytes,
        *,
        processes: int,
        memory: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._setup = {"path": list(sys.path), "memory": memory, "function": function}
        self._environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **(environment or {})}
        self._number = processes
        self._prepare()

    def _prepare(self) -> None:
        """Initialize the state without any process."""
        self._owner, self._lock, self._open = os.getpid(), threading.Lock(), True
        self._threads = ThreadPoolExecutor(self._number, thread_name_prefix="reward")
        self._processes: list[Process] = []
        self._failure = ""  # reason why no process can start
        weakref.finalize(self, _end_all, self._processes)

    def submit(self, payload: bytes, seconds: float) -> "Future[bytes]":
        """Queue a task.

        Args:
            payload: Pickled task; see :func:`.process_worker.answer`.
            seconds: Time limit, from the moment a process receives the task.

        Returns:
            Future of the pickled result; a :class:`LostError` if there is none.
        """
        if self._owner != os.getpid():
            self._prepare()
        future: Future[bytes] = Future()
        self._threads.submit(self._run, future, payload, seconds)
        return future

    def abandon(self, futures: "Collection[Future[bytes]]") -> None:
        """Cancel tasks and kill the processes that run them."""
        with self._lock:
            for future in futures:
                future.cancel()
            for process in self._processes:
                if process.future in futures:
                    process.kill()

    def close(self) -> None:
        """End every process; unfinished tasks are lost."""
        with self._lock:
            self._open = False
            for process in self._processes:
                process.kill()
        self._threads.shutdown()
        _end_all(self._processes)

    def pids(self) -> list[int]:
        """Process ids of the guards of the running processes."""
        with self._lock:
            return [process.popen.pid for process in self._processes if process.popen is not None]

    def _run(self, future: "Future[bytes]", payload: bytes, seconds: float) -> None:
        with self._lock:
            if not self._open:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                return
            process = next((each for each in self._processes if each.future is None), None)
            if process is None:
                process = Process(self._setup, self._environment)
                self._processes.append(process)
            process.future = future
        try:
            if self._failure:
                raise LostError(self._failure)
            result = process.ask(payload, seconds)
        except LostError as error:
            self._failure = self._failure or process.failure
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            process.future = None


class Process:
    """Worker process with its guard (:mod:`lightning_rl.rewards.process_worker`), started on demand."""

    def __init__(self, setup: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._setup, self._environment = setup, environment
        self.popen: subprocess.Popen[bytes] | None = None
        self.future: Future[bytes] | None = None  # of its task
        self.failure = ""  # reason why it cannot start
        self._connection: Connection | None = None
        self._life, self._lock = -1, threading.Lock()

    def ask(self, payload: bytes, seconds: float) -> bytes:
        """Return the result of a task, from a new process if there is none.

        Raises:
            LostError: If the process dies or takes longer.
        """
        try:
            connection = self._connection or self._start()
            connection.send_bytes(payload)
            if connection.poll(seconds):
                return connection.recv_bytes()
        except (EOFError, OSError):  # either end of the pipe is closed
            raise LostError(self.failure or self._death()) from None
        self.end()
        raise LostError(f"took longer than {seconds:g} s")

    def _start(self) -> Connection:
        here, there = Pipe()
        life, own_life = os.pipe()
        with self._lock:
            self._life = own_life
        self.popen = subprocess.Popen(
            [sys.executable, str(WORKER), str(there.fileno()), str(life)],
            pass_fds=(there.fileno(), life),
            env=dict(self._environment),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        there.close()
        os.close(life)
        self._connection = here
        here.send(self._setup)
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
                popen.wait(EXIT_SECONDS)  # let it exit by itself before the kill
        self.end()
        code = None if popen is None else popen.returncode
        if code is not None and code > 128:
            return f"lost its process to {Signals(code - 128).name}"
        return f"lost its process, which exited with status {code}"

    def kill(self) -> None:
        """Tell the guard to kill the process and its descendants; callable from any thread."""
        with self._lock:
            life, self._life = self._life, -1
        if life >= 0:
            os.close(life)

    def end(self) -> None:
        """Kill the process and its descendants, and wait for the exit."""
        self.kill()
        popen, connection = self.popen, self._connection
        self.popen = self._connection = None
        if connection is not None:
            connection.close()
        if popen is not None:
            try:
                popen.wait(10.0)
            except subprocess.TimeoutExpired:
                popen.kill()
                popen.wait()


def _end_all(processes: "list[Process]") -> None:
    """Kill all processes at once, then wait for each."""
    for process in processes:
        process.kill()
    for process in processes:
        process.end()
