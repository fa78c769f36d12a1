"""Program of the processes of a pool: a server that loads a function and forks workers that call it.

It runs as a script and imports nothing of this library, so that it starts fast. Server and workers have a guard each,
which kills the process and all its descendants when the pool closes its life line or the trainer exits.
"""

import contextlib
import ctypes
import faulthandler
import os
import re
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn

import cloudpickle

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
DEATH_SIGNAL, SUBREAPER = 1, 36  # of prctl


def main() -> None:
    """Serve a pool, or run the command that follows; ``argv`` holds the descriptor of control socket or life line."""
    descriptor, command = int(sys.argv[1]), sys.argv[2:]
    if not command:
        serve(Connection(descriptor))
    fork_with_guard(socket.socket(fileno=descriptor))
    os.execvp(command[0], command)


def serve(control: Connection) -> NoReturn:
    """Load the function with a guard, then fork a worker whenever the pool sends its descriptors."""
    fork_with_guard(socket.socket(fileno=reduction.recv_handle(control)))
    control.send((os.getppid(), os.getpid()))
    faulthandler.enable()  # SIGABRT prints a traceback
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the trainer
    setup = control.recv()
    sys.path[:] = setup["path"]
    if setup["memory"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory"], setup["memory"]))
    try:
        function = cloudpickle.loads(setup["function"])
    except BaseException:  # noqa: BLE001  the boundary to foreign code
        control.send(traceback.format_exc())
        os._exit(1)
    control.send("")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guards are not waited for
    while True:
        try:
            descriptors = [reduction.recv_handle(control) for _ in range(2)]
        except (EOFError, OSError):
            os._exit(0)  # an orderly exit takes seconds
        flush()
        if os.fork() == 0:
            control.close()
            work(function, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def work(function: Callable[..., Any], tasks: int, life: int) -> NoReturn:
    """Become a worker, and call the function until the pool closes the connection."""
    fork_with_guard(socket.socket(fileno=life))
    for file in (sys.stdout, sys.stderr):
        file.reconfigure(line_buffering=True)  # pyrefly: ignore[missing-attribute]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in ("numpy.random", "torch"):  # else all workers draw the same numbers; `random` seeds itself
        if name in sys.modules:
            sys.modules[name].seed()
    connection, pid = Connection(tasks), os.getpid()
    with contextlib.suppress(EOFError, OSError):
        connection.send((os.getppid(), pid))
        while True:
            reply = answer(function, connection.recv_bytes())
            flush()
            if os.getpid() != pid:
                os._exit(0)  # a child that the function forked must not reply
            connection.send_bytes(reply)
    os._exit(0)


def answer(function: Callable[..., Any], task: bytes) -> bytes:
    """Return the pickled reply to a task of pickled arguments and keywords: the result or the error."""
    try:
        arguments, keywords, *headers = cloudpickle.loads(task)
        if any(headers):  # of a span in the trainer, as by utils.tracing.carrier
            from opentelemetry import context, propagate

            context.attach(propagate.extract(*headers))
        return cloudpickle.dumps(("returned", function(*arguments, **keywords)))
    except BaseException as error:  # noqa: BLE001  the boundary to foreign code, which may call exit() as well
        text, representation = describe(error)
        trace = traceback.format_exc()[-8000:]
        return cloudpickle.dumps(("raised", type(error).__name__, text, trace, representation))


def describe(error: BaseException) -> tuple[str, str]:
    """Return text, without memory addresses, and representation of an error."""
    try:
        return ADDRESS.sub("", str(error))[:2000], repr(error)[:500]
    except Exception:  # noqa: BLE001  methods of foreign code
        return "", type(error).__name__


def flush() -> None:
    """Write what is printed, because a fork would print it twice and a killed process never."""
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            file.flush()


def fork_with_guard(life: socket.socket) -> None:
    """Fork, and return in the new process; this one becomes its guard.

    Args:
        life: Socket to the trainer. If its other end is closed, the guard kills the process. When the process and all
            its descendants have ended, it sends the exit status, 128 plus the signal number if a signal ended it.
    """
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    adopt_orphans()
    guard_pid = os.getpid()
    worker = os.fork()
    if worker:
        guard(worker, life)
    life.close()
    os.setpgid(0, 0)
    _control(DEATH_SIGNAL, signal.SIGKILL)  # if the guard is killed
    if os.getppid() != guard_pid:
        os._exit(1)


def guard(worker: int, life: socket.socket) -> NoReturn:
    """Wait until a process ends or the trainer closes the life line, then kill all descendants and exit."""
    codes: dict[int, int] = {}

    def pass_on(number: int, frame: FrameType | None) -> None:
        del frame
        _kill(os.killpg, worker, number)

    # Python runs handlers between instructions, so a signal just before a blocking call would not end it: a byte does.
    signals, sink = socket.socketpair()
    sink.setblocking(False)  # noqa: FBT003
    signal.set_wakeup_fd(sink.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        codes.update(reap())
        if worker in codes or life in select.select([life, signals], [], [])[0]:
            break
        signals.recv(4096)
    _kill(os.killpg, worker, signal.SIGKILL)
    while worker not in codes or children():
        for child in {worker, *children()} - set(codes):  # also those outside of its process group
            _kill(os.kill, child, signal.SIGKILL)
        time.sleep(0.001)
        codes.update(reap())
    code = codes[worker] if codes[worker] >= 0 else 128 - codes[worker]
    with contextlib.suppress(OSError):  # the trainer is gone
        life.send(bytes([code]))
    os._exit(code)


def reap() -> dict[int, int]:
    """Return the exit codes of ended children, adopted orphans included."""
    codes: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return codes


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


def _kill(kill: Callable[[int, int], None], pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(pid, number)


def _control(option: int, value: int) -> None:
    """Call ``prctl`` on Linux."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
