"""Worker: the program that calls one reward function in a process of its own, and the guard that ends it.

It is run as a script and imports nothing of this library, so that a worker starts in a moment. The guard is a process
that does nothing but wait: it kills the worker, with all that the worker started, when the trainer says so or is gone.
"""

import asyncio
import contextlib
import inspect
import itertools
import os
import resource
import select
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle


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
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    worker = os.fork()
    if worker:
        os.close(tasks)
        guard(worker, life, ended)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in (life, ended, wake):
        os.close(descriptor)
    os.setpgid(0, 0)
    serve(Connection(tasks))


def guard(worker: int, life: int, ended: int) -> None:
    """Waits for the worker to end or for the trainer to let go of the life line, and leaves nothing behind."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    select.select([life, ended], [], [])
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)  # before it has a group
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


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
