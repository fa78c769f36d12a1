"""Pool of worker processes that call one function; a worker that hangs or dies is killed with its descendants.

Workers are forks of a server that has loaded the function (:mod:`lightning_rl.processes.worker`). A fork starts in
milliseconds and shares the server's memory.
"""

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from signal import SIGABRT, SIGKILL, Signals
from typing import Any

import cloudpickle
from typing_extensions import override

from lightning_rl.processes.errors import DEATH, INTERRUPT, LOADING, TIMEOUT, CallError, LostWorkerError
from lightning_rl.processes.timeouts import CLOCK, HURRY

STARTUP_SECONDS = 120.0  # to load the function, and for a worker to start
EXIT_SECONDS = 5.0  # for a worker to exit after it closed its connection
TRACEBACK_SECONDS = 1.0  # for a late worker to print its traceback
KILL_SECONDS = 10.0  # after which a killed process counts as gone
POLL_SECONDS = 1.0  # between checks for the end of the run
QUIET = {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"} | {
    f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")
}
WORKER = Path(__file__).with_name("worker.py")
BLOCKED: ContextVar[Callable[[int], None]] = ContextVar("BLOCKED", default=lambda _: None)
"""Function for 1 when its caller begins to wait for a worker that others hold, and for -1 when the wait ends."""


class Pool:
    """Worker processes that call one function, each leased by one caller at a time.

    Processes start on demand, and end with the pool or the trainer. A copy and a fork of the trainer start their own.

    Args:
        function: Function, pickled by cloudpickle.
        processes: Maximum number of workers.
        memory: Address space of each process in bytes; None for no limit.
        environment: Environment variables of the processes, added to those of the trainer; by default no GPU and one
            thread.

    Attributes:
        tries: Maximum number of workers that get a task, one after the other, if they are lost with their nodes.
    """

    tries = 3

    def __init__(
        self,
        function: bytes,
        *,
        processes: int,
        memory: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.function, self.processes, self.memory = function, processes, memory
        self.environment = dict(environment or {})
        self._prepare()

    def _prepare(self) -> None:
        """Initialize the state without any process."""
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._free = threading.BoundedSemaphore(self.processes)
        self._threads = ThreadPoolExecutor(self.processes, thread_name_prefix="worker")
        self._tasks: weakref.WeakSet[_Task] = weakref.WeakSet()
        self._idle: list[Worker] = []
        self._live: set[Worker] = set()
        self._servers: list[_Server] = []  # one, once it is needed
        weakref.finalize(self, _end_all, self._owner, self._live, self._servers)

    def __getstate__(self) -> dict[str, Any]:
        """Return the options, without processes."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the options; processes start on demand."""
        vars(self).update(state)
        self._prepare()

    @property
    def address(self) -> str:
        """Address at which workers reach this machine."""
        return "127.0.0.1"

    def submit(self, task: bytes, seconds: float, read: Callable[[Any], Any] | None = None) -> "Future[Any]":
        """Queue a task.

        Args:
            task: Pickled arguments and keywords.
            seconds: Time limit, from the moment a worker receives the task.
            read: Function from what the worker returned to the result; None for no change.

        Returns:
            Future of the result; it raises a :class:`CallError` if there is none. Cancelling it kills the worker.
        """
        if self._owner != os.getpid():
            self._prepare()
        queued = _Task(self._lock)
        self._tasks.add(queued)
        self._threads.submit(self._run, queued, task, seconds, read)
        return queued

    def _run(self, queued: "_Task", task: bytes, seconds: float, read: Callable[[Any], Any] | None) -> None:
        if not queued.set_running_or_notify_cancel():
            return
        try:
            result = self._ask(queued, task, seconds, self.tries)
            result = result if read is None else read(result)
        except Exception as error:  # noqa: BLE001  raised where the result is read
            queued.set_exception(error.with_traceback(None))  # whose frames hold this pool
        else:
            queued.set_result(result)

    def _ask(self, queued: "_Task", task: bytes, seconds: float, tries: int) -> Any:
        worker = self.lease(queued)
        try:
            return worker.ask(task, seconds)
        except LostWorkerError:
            if tries == 1:
                raise
        finally:
            self.release(worker, keep=not worker.killed, task=queued)
        return self._ask(queued, task, seconds, tries - 1)

    def lease(self, task: "_Task | None" = None) -> "Worker":
        """Return a free worker; wait until there is one.

        Raises:
            CallError: If the function cannot be loaded in a process, if the task was cancelled, or if a signal stops
                the run.
        """
        self._free.acquire()
        try:
            with self._lock:
                server = self._server()
            server.load()  # without the lock, so that close() can end it
            with self._lock:
                if task is not None and task.abandoned:
                    raise CallError(DEATH, "was cancelled")
                worker = self._ready() or server.fork()
                self._live.add(worker)
                if task is not None:
                    task.worker = worker
            worker.start()
            return worker
        except BaseException:
            self._free.release()
            raise

    def _ready(self) -> "Worker | None":
        """Return a living worker that is idle, if there is one."""
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            worker.end()
            self._live.discard(worker)
        return None

    def _server(self) -> "_Server":
        """Return the server, or a new one if it has died."""
        if self._servers and self._servers[0].failure == "" and not self._servers[0].alive:
            self._servers.pop().end()
        if not self._servers:
            environment = {**os.environ, **QUIET, **self.environment}
            self._servers.append(_Server(self.function, self.memory, environment))
        return self._servers[0]

    def release(self, worker: "Worker", *, keep: bool, task: "_Task | None" = None) -> None:
        """Return a worker to the pool, or end it."""
        if not keep:
            worker.end()
        with self._lock:
            if task is not None:
                task.worker = None
            (self._idle.append if keep else self._live.discard)(worker)
        self._free.release()

    def pids(self) -> list[int]:
        """Return the ids of all processes: the server and the workers, each with its guard."""
        with self._lock:
            return [pid for process in (*self._servers, *self._live) for pid in process.pids]

    def close(self) -> None:
        """End every process: calls in progress fail, queued tasks are cancelled, later ones start new processes."""
        for task in list(self._tasks):
            task.cancel()
        with self._lock:
            _end_all(self._owner, self._live, self._servers)
            self._idle = []


class _Task(Future[Any]):
    """Queued task; cancelling it kills the worker that runs it."""

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__()
        self._lock, self.abandoned, self.blocked = lock, False, BLOCKED.get()
        self.worker: Worker | None = None

    @property
    def waits(self) -> bool:
        """True while no worker runs it."""
        return self.worker is None and not self.done()

    @override
    def cancel(self) -> bool:
        with self._lock:
            self.abandoned = True
            if self.worker is not None:
                self.worker.kill()
        return super().cancel()


class Worker:
    """Worker process, with a connection for tasks and replies, and the life line of its guard."""

    def __init__(self, connection: Connection, life: socket.socket) -> None:
        self._connection, self._life = connection, life
        self._lock = threading.Lock()
        self._code: int | None = None
        self.killed = False
        self.pids: Sequence[int] = ()

    def start(self) -> None:
        """Wait until it has started; a failed start is reported by the first task."""
        with contextlib.suppress(EOFError, OSError):
            if not self.pids and self._connection.poll(STARTUP_SECONDS):
                self.pids = self._connection.recv()

    @property
    def alive(self) -> bool:
        """True if it is ready for a task; the connection of a dead worker is closed."""
        try:
            return not self.killed and not self._connection.poll(0)
        except OSError:
            return False

    def ask(self, task: bytes, seconds: float) -> Any:
        """Call the function and return its result.

        Args:
            task: Pickled arguments and keywords.
            seconds: Time limit.

        Raises:
            CallError: If the call raises, dies or takes longer, or if a signal stops the run; except after an exception
                the worker has ended.
        """
        return open_reply(self.exchange(task, seconds))

    def exchange(self, task: bytes, seconds: float) -> bytes:
        """Send a task and return the pickled reply; raises as :meth:`ask` does without an exception of the call."""
        try:
            self._connection.send_bytes(task)
            if wait_within(self._connection.poll, seconds):
                return self._connection.recv_bytes()
            failure = self._late(seconds)
        except (EOFError, OSError):
            failure = self._death()
        raise failure

    def _late(self, seconds: float) -> CallError:
        if CLOCK.stopped_by:
            self.end()
            return CallError(INTERRUPT, CLOCK.reason())
        with contextlib.suppress(OSError, IndexError):
            os.kill(self.pids[-1], SIGABRT)  # prints a traceback
        self.end(TRACEBACK_SECONDS)
        return CallError(TIMEOUT, f"took longer than {seconds:g} s")

    def _death(self) -> CallError:
        code = self.end(EXIT_SECONDS)
        how = "is gone" if code is None else f"exited with status {code}"
        if code is not None and code > 128:
            how = f"was ended by {Signals(code - 128).name}"
        return CallError(DEATH, how)

    def kill(self) -> None:
        """Make the guard kill the worker and its descendants; thread-safe."""
        self.killed = True
        with contextlib.suppress(OSError):
            self._life.shutdown(socket.SHUT_WR)

    def _kill_by_id(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(OSError):
                os.kill(pid, SIGKILL)

    def end(self, patience: float = 0.0) -> int | None:
        """Kill the worker, after ``patience`` seconds to exit, and its descendants; return its exit status."""
        with self._lock:
            if self._life.fileno() >= 0:
                wait([self._life], patience)
                self.kill()
                if not wait([self._life], KILL_SECONDS):  # a guard that is stopped
                    self._kill_by_id()
                with self._life, contextlib.suppress(OSError):
                    self._life.setblocking(False)  # noqa: FBT003
                    self._code = next(iter(self._life.recv(1)), None)
                self._connection.close()
            return self._code


class _Server(Worker):
    """Server process from which workers are forked.

    Attributes:
        failure: Reason why it could not load the function, or an empty string; None until :meth:`load` returns.
    """

    def __init__(self, function: bytes, memory: int | None, environment: Mapping[str, str]) -> None:
        control, theirs = Pipe()
        life, guard = socket.socketpair()
        super().__init__(control, life)
        self._loading = threading.Lock()
        self.failure: str | None = None
        with theirs, guard:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            with contextlib.suppress(OSError):  # a server that has died: load() reports it
                reduction.send_handle(control, guard.fileno(), self._popen.pid)
                control.send({"path": sys.path, "memory": memory, "function": function})

    def load(self) -> None:
        """Wait until the function is loaded.

        Raises:
            CallError: If it cannot be loaded in time, or if a signal stops the run.
        """
        with self._loading:
            if self.failure is None:
                self.failure = self._load()
        if self.failure:
            raise CallError(LOADING, self.failure)

    def _load(self) -> str:
        try:
            self.start()
            if wait_within(self._connection.poll, STARTUP_SECONDS):
                return self._connection.recv()
            failure = self._late(STARTUP_SECONDS)
        except (EOFError, OSError):
            failure = self._death()
        if failure.kind == INTERRUPT:
            raise failure
        return f"the process {failure.message}"

    def fork(self) -> Worker:
        """Fork a worker."""
        connection, tasks = Pipe()
        life, guard = socket.socketpair()
        with tasks, guard, contextlib.suppress(OSError):  # a server that has died: the first task reports it
            for descriptor in (tasks.fileno(), guard.fileno()):
                reduction.send_handle(self._connection, descriptor, self._popen.pid)
        return Worker(connection, life)

    @override
    def end(self, patience: float = 0.0) -> int | None:
        code = super().end(patience)
        self._popen.kill()  # has exited, unless it was stopped
        self._popen.wait()
        return code


def wait_within(wait: Callable[[float], bool], seconds: float) -> bool:
    """Return True if ``wait(seconds)`` does so in time; a signal that stops the run shortens the time."""
    end, hurried = time.monotonic() + seconds, False
    while (left := end - time.monotonic()) > 0:
        if CLOCK.stopped_by and not hurried:
            end, hurried = min(end, time.monotonic() + HURRY), True
        elif wait(min(left, POLL_SECONDS)):
            return True
    return False


def open_reply(reply: bytes) -> Any:
    """Return the result in a reply of :func:`.worker.answer`.

    Raises:
        CallError: If the call raised, or its result cannot be unpickled.
    """
    try:
        kind, *values = pickle.loads(reply)
    except Exception as error:  # noqa: BLE001  methods of foreign code
        failure = CallError.of(error)
        raise CallError(
            failure.kind, f"returned a value that cannot be unpickled: {error!r:.500}", failure.log
        ) from None
    if kind == "raised":
        raise CallError(*values)
    return values[0]


def dump(value: Any, role: str, advice: str) -> bytes:
    """Return a value pickled by cloudpickle.

    Args:
        value: Value.
        role: Description for the error, such as "a reward".
        advice: Advice for the error.

    Raises:
        ValueError: If it cannot be pickled.
    """
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise ValueError(
            f"expected {role} that can be sent to another process, got {type(error).__name__}: {error}: {advice}"
        ) from error


def _end_all(owner: int, live: "set[Worker]", servers: "list[_Server]") -> None:
    """Kill all workers at once, then the server."""
    if os.getpid() != owner:
        return  # a fork shares the connections
    for processes in (live, servers):  # workers first, because the guard of a server kills them as well
        for process in processes:
            process.kill()
        for process in processes:
            process.end()
    live.clear()
    servers.clear()
