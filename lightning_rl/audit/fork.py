"""Fork: what a task comes to in a copy of this process, which reaches nothing outside of itself and is thrown away.

The copy has all that the process has in memory, globals and generators included, and none of its files, sockets and
threads: a function that is asked there leaves no trace in the run. What it would open for writing, connect to or start
is refused, and then there is no answer.
"""

import gc
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

REACHING = (
    "socket.",
    "subprocess.",
    "shutil.",
    "sqlite3.",
    "os.system",
    "os.fork",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.utime",
    "os.kill",
    "os.chmod",
    "os.chown",
    "os.setxattr",
)
"""Beginnings of the events of ``sys.addaudithook`` that leave the process."""

TOO_LATE = "a copy of it did not answer in time"
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHUNK = 65536


class Reply(NamedTuple):
    """What a task came to.

    Attributes:
        value: that it returned, as JSON has it: a sequence is a list.
        reason: why there is none, as one clause; empty if there is one.
    """

    value: Any = None
    reason: str = ""


class NoReplyError(RuntimeError):
    """A task in a copy cannot say anything; the message is the reason."""


class Fork:
    """A task in a copy of this process, which starts at once.

    Args:
        task: what the copy does; its result is plain values and sequences of them.
        seconds: from the start on that it may take.
    """

    def __init__(self, task: Callable[[], Any], seconds: float) -> None:
        self._reader, self._pid, self._end = -1, 0, time.monotonic() + seconds
        if not hasattr(os, "fork"):
            return
        self._reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which the copy does not need
            self._pid = _fork()
        if not self._pid:
            _serve(task, writer, seconds)
        os.close(writer)

    def reply(self) -> Reply:
        """Waits for the copy, and ends it."""
        if not self._pid:
            return Reply(reason="this system cannot copy a process")
        try:
            payload = self._receive()
        finally:
            self.close()
        if payload is None:
            return Reply(reason=TOO_LATE)
        try:  # whatever a copy says is data, and runs nothing here
            value, reason = json.loads(payload)
        except (ValueError, TypeError, RecursionError):
            return Reply(reason="a copy of it died" if not payload else "a copy of it said what it was not asked")
        return Reply(value, str(reason))

    def close(self) -> None:
        """Ends the copy, whatever it does."""
        if self._pid:
            _copies.add(self._pid)
            os.kill(self._pid, signal.SIGKILL)
            _copies.discard(self._pid)
            os.waitpid(self._pid, 0)
            os.close(self._reader)
            self._pid = 0

    def _receive(self) -> bytes | None:
        parts = list[bytes]()
        while (left := self._end - time.monotonic()) > 0:
            if not select.select([self._reader], [], [], left)[0]:
                break
            parts.append(os.read(self._reader, CHUNK))
            if not parts[-1]:
                return b"".join(parts)
        return None


def ask_copy(task: Callable[[], Any], seconds: float) -> Any:
    """What a task returns in a copy of this process.

    Raises:
        NoReplyError: if it says nothing.
    """
    reply = Fork(task, seconds).reply()
    if reply.reason:
        raise NoReplyError(reply.reason)
    return reply.value


def _fork() -> int:
    """As ``os.fork``, which nobody else may call in a copy."""
    _own.add("os.fork")
    try:
        return os.fork()
    finally:
        _own.discard("os.fork")


_own = set[str]()  # events that are this module's
_reached = list[str]()  # of a copy: what it was refused
_copies = set[int]()  # of this process that may be ended, in a copy as well


def _serve(task: Callable[[], Any], writer: int, seconds: float) -> NoReturn:
    """The life of a copy."""
    try:
        gc.disable()  # what the process would close or delete at the end belongs to the process
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(int(seconds) + 1)  # also where nobody waits any more
        _close_files(writer)
        torch.set_num_threads(1)
        sys.dont_write_bytecode = True
        sys.addaudithook(_refuse)
        try:
            reply = Reply(task())
        except NoReplyError as none:
            reply = Reply(reason=str(none))
        except BaseException as error:  # noqa: BLE001  foreign code
            reply = Reply(reason=f"a copy of it raised {type(error).__name__}: {error}")
        if _reached:
            reply = Reply(reason=f"a copy of it would reach out of its process ({_reached[0]})")
        payload = json.dumps(reply, default=float).encode()
        while payload:
            payload = payload[os.write(writer, payload) :]
    finally:
        os._exit(0)


def _close_files(kept: int) -> None:
    """Puts nothing in the place of every file of the process in its copy, where writing would be writing in the run.

    The numbers stay taken: text that foreign code writes to a file that it holds reaches none that the copy opens.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        numbers = [int(file.name) for file in Path("/proc/self/fd").iterdir()]
    except OSError:
        numbers = list(range(3, 256))
    for number in {0, 1, 2, *numbers} - {kept, nothing}:
        try:
            os.fstat(number)
            os.dup2(nothing, number)
        except OSError:  # the folder's own, closed by now
            continue


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuses what would leave the process."""
    if event in _own or (event == "os.kill" and arguments[0] in _copies):
        return
    writes = event == "open" and bool((arguments[2] or 0) & WRITING) and arguments[0] != os.devnull
    if writes or event.startswith(REACHING):
        _reached.append(event)
        raise PermissionError(f"{event} in a copy of the process")
