"""Worker: the program that calls one reward function in a process of its own, and the guard that ends it.

It is run as a script and imports nothing of this library, so that a worker starts in a moment. The guard is a process
that does nothing but wait: it kills the worker, with all that the worker started, when the trainer says so or is gone.
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
    """What a call notes beside its values, to be checked where it arrives."""

    def __init__(self) -> None:
        self.extras: list[tuple[str, list[Any]]] = []
        self.metrics: list[tuple[str, float]] = []

    def log_extra(self, column: str, values: Any) -> None:
        """Keeps a column."""
        self.extras.append((str(column), list(values)))

    def log_metric(self, name: str, value: Any) -> None:
        """Keeps a number."""
        self.metrics.append((str(name), float(value)))


def main() -> None:
    """Forks into worker and guard; the descriptors of task pipe and life line are the arguments."""
    tasks, life = int(sys.argv[1]), int(sys.argv[2])
    if (code := split(life, [tasks])) is not None:
        os._exit(code)
    serve(Connection(tasks))


class Log:
    """What a worker prints: the first and the last of it.

    Args:
        descriptor: to read from.
        size: bytes that are kept of the beginning, and as many of the end.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size, self.open = descriptor, size, True
        os.set_blocking(descriptor, False)
        self.forget()

    def forget(self) -> None:
        """Begins anew, whatever has been printed."""
        self._first, self._last, self._omitted = b"", b"", 0

    def read(self) -> bool:
        """Takes what is there; whether there was more than a pipe holds, from somebody who prints on and on."""
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
        """What is kept, and how much is not."""
        gap = f"\n[{self._omitted} bytes left out]\n" if self._omitted else ""
        return self._first.decode(errors="replace") + gap + self._last.decode(errors="replace")


def split(life: int, others: Sequence[int], log: Log | None = None) -> int | None:
    """Forks into a worker, which goes on, and its guard, which returns when nothing of the worker is left.

    Args:
        life: line to the trainer: the worker ends when its other end is closed.
        others: descriptors that are the worker's alone.
        log: what the worker prints, for the guard to read; a byte on the life line clears it and is answered by one.

    Returns:
        None in the worker; in the guard its exit status, 128 and the number of the signal that ended it.
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
    _control(DEATH_SIGNAL, signal.SIGKILL)  # should anybody kill the guard
    if os.getppid() != guard_pid:
        os._exit(1)
    return None


def guard(worker: int, life: int, ended: int, log: Log | None = None) -> int:
    """Waits for the worker to end or for the trainer to let go of the life line, and leaves nothing behind."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    codes: dict[int, int] = {}
    while worker not in codes:
        prints = [log.descriptor] if log is not None and log.open else []
        ready = select.select([life, ended, *prints], [], [])[0]
        if log is not None and prints and log.read():
            time.sleep(0.1)  # a worker that floods waits, and leaves the machine to others
        if life in ready:
            if not _read(life):
                break
            if log is not None:
                log.forget()
                with contextlib.suppress(OSError):  # the trainer is gone: the next read says so
                    os.write(life, b"\0")
        if ended in ready:
            _read(ended)
            codes |= reap()
    return end(worker, codes, log)


def reap() -> dict[int, int]:
    """How children ended that have done so; among them whoever was left by a parent of its own."""
    codes: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return codes


def end(worker: int, codes: dict[int, int], log: Log | None) -> int:
    """Kills a worker with all that it started, also what has left its group; how the worker ended."""
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
    """Processes whose parent this one is, where the system tells; orphans are the nearest guard's."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123  the guard imports little
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def adopt_orphans() -> None:
    """Has Linux make orphans among the descendants of this process its children."""
    _control(SUBREAPER, 1)


def _read(descriptor: int) -> bytes:
    """What is there; nothing if the other end is closed."""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


def _control(option: int, value: int) -> None:
    """Asks Linux for something about this process."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def serve(connection: Connection) -> None:
    """Loads the function that comes first, then calls it with whatever comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        function = start(connection)
        while True:
            connection.send_bytes(answer(function, connection.recv_bytes()))


def start(connection: Connection) -> Any:
    """Makes the process like the trainer's, as far as a function can tell, and loads the function."""
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
    """What a call returned and noted, or the exception that it raised with its traceback."""
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
    """Awaits anything."""
    return await awaitable


if __name__ == "__main__":
    main()
