"""Program that calls one reward function in a separate process, with a guard process that ends it.

It runs as a script and imports nothing of this library, so that it starts fast. The guard kills the worker and its
descendants when the trainer asks for it or exits.
"""

import asyncio
import contextlib
import ctypes
import inspect
import itertools
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

DEATH_SIGNAL, SUBREAPER = 1, 36  # of prctl


class Notes:
    """Extras and metrics that a call logs; the trainer checks them."""

    def __init__(self) -> None:
        self.extras: list[tuple[str, list[Any]]] = []
        self.metrics: list[tuple[str, float]] = []

    def log_extra(self, column: str, values: Any) -> None:
        """Store a column."""
        self.extras.append((str(column), list(values)))

    def log_metric(self, name: str, value: Any) -> None:
        """Store a number."""
        self.metrics.append((str(name), float(value)))


def main() -> None:
    """Fork into worker and guard; ``argv`` holds the descriptors of the task pipe and the life line."""
    tasks, life = int(sys.argv[1]), int(sys.argv[2])
    if (code := split(life, [tasks])) is not None:
        os._exit(code)
    serve(Connection(tasks))


class Log:
    """Beginning and end of a worker's output.

    Args:
        descriptor: Descriptor to read from.
        size: Number of bytes kept of the beginning and of the end.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size, self.open = descriptor, size, True
        os.set_blocking(descriptor, False)
        self.forget()

    def forget(self) -> None:
        """Clear the log."""
        self._first, self._last, self._omitted = b"", b"", 0

    def read(self) -> bool:
        """Read the available output; return True if there was more than a pipe holds."""
        for _ in range(4):
            try:
                part = os.read(self.descriptor, 65536)
            except BlockingIOError:
                return False
            self.open = bool(part)
            if not part:
                return False
            room = self.size - len(self._first)
            self._first, rest = self._first + part[:room], self._last + part[room:]
            self._last = rest[-self.size :]
            self._omitted += len(rest) - len(self._last)
        return True

    def text(self) -> str:
        """Return the kept output, with the number of bytes left out."""
        gap = f"\n[{self._omitted} bytes left out]\n" if self._omitted else ""
        return self._first.decode(errors="replace") + gap + self._last.decode(errors="replace")


def split(life: int, others: Sequence[int], log: Log | None = None) -> int | None:
    """Fork into a worker, which continues, and its guard, which returns after the worker and its descendants end.

    Args:
        life: Socket to the trainer: the worker is killed when the other end is closed.
        others: Descriptors that only the worker keeps.
        log: Output of the worker, read by the guard; a byte on the life line clears it, and the guard replies with a
            byte.

    Returns:
        None in the worker; in the guard the exit status, 128 plus the signal number if a signal ended the worker.
    """
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(ended, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    adopt_orphans()
    guard_pid = os.getpid()
    worker = os.fork()
    if worker:
        for descriptor in others:
            os.close(descriptor)
        return guard(worker, life, ended, log)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in (life, ended, wake, *([] if log is None else [log.descriptor])):
        os.close(descriptor)
    os.setpgid(0, 0)
    _control(DEATH_SIGNAL, signal.SIGKILL)  # if the guard is killed
    if os.getppid() != guard_pid:
        os._exit(1)
    return None


def guard(worker: int, life: int, ended: int, log: Log | None = None) -> int:
    """Wait until the worker ends or the trainer closes the life line, then kill the descendants."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    codes: dict[int, int] = {}
    while worker not in codes:
        prints = [log.descriptor] if log is not None and log.open else []
        ready = select.select([life, ended, *prints], [], [])[0]
        if log is not None and prints and log.read():
            time.sleep(0.1)  # throttle a worker that floods its output
        if life in ready:
            if not _read(life):
                break
            if log is not None:
                log.forget()
                with contextlib.suppress(OSError):  # if the trainer is gone, the next read returns nothing
                    os.write(life, b"\0")
        if ended in ready:
            _read(ended)
            codes |= reap()
    return end(worker, codes, log)


def reap() -> dict[int, int]:
    """Return the exit codes of ended children, adopted orphans included."""
    codes: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return codes


def end(worker: int, codes: dict[int, int], log: Log | None) -> int:
    """Kill a worker and all its descendants, also outside of its process group; return its exit status."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    while worker not in codes or children():
        for child in {worker, *children()} - set(codes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.001)
        codes |= reap()
    if log is not None:
        log.read()
    code = codes[worker]
    return code if code >= 0 else 128 - code


def children() -> list[int]:
    """Return the process ids of the children, adopted orphans included; an empty list if unsupported."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123  the guard imports little
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants (Linux)."""
    _control(SUBREAPER, 1)


def _read(descriptor: int) -> bytes:
    """Return the available bytes; empty if the other end is closed."""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


def _control(option: int, value: int) -> None:
    """Call ``prctl`` on Linux."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def serve(connection: Connection) -> None:
    """Load the function from the first message, then call it with each further message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        function = start(connection)
        while True:
            connection.send_bytes(answer(function, connection.recv_bytes()))


def start(connection: Connection) -> Any:
    """Set the import path and memory limit of the trainer, then load the function."""
    setup = connection.recv()
    sys.path[:] = setup["path"]
    if setup["memory"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory"], setup["memory"]))
    try:
        function = cloudpickle.loads(setup["function"])
    except BaseException:  # noqa: BLE001  the boundary to foreign code
        connection.send(traceback.format_exc())
        os._exit(1)
    connection.send("")
    return function


def answer(function: Any, task: bytes) -> bytes:
    """Return the pickled result and notes of a call, or its exception with traceback."""
    notes = Notes()
    try:
        arguments, keywords, extras, rows = cloudpickle.loads(task)
        known = {"log_extra": notes.log_extra, "log_metric": notes.log_metric}
        keywords |= {name: known[name] for name in extras if name in known}
        returned = function(*arguments, **keywords)
        if inspect.isawaitable(returned):
            returned = asyncio.run(wait_for(returned))
        if hasattr(returned, "__next__"):
            returned = list(itertools.islice(returned, rows + 1))
        return cloudpickle.dumps(("returned", returned, notes.extras, notes.metrics))
    except BaseException as error:  # noqa: BLE001  the boundary to foreign code, which may call exit() as well
        return cloudpickle.dumps(("raised", repr(error), traceback.format_exc(), ()))


async def wait_for(awaitable: Any) -> Any:
    """Await any awaitable."""
    return await awaitable


if __name__ == "__main__":
    main()
