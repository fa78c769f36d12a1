"""Commands in a process: one that ends with this process, and one within limits of time and output."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Literal

from lightning_rl.processes.pool import WORKER

PRIVATE = 0o077  # umask: sockets and files are for this user only
PATIENCE = 10.0  # seconds between SIGTERM and SIGKILL
Ending = Literal["exited", "too long", "too much output"]


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command until it ends or SIGINT or SIGTERM arrives, then end all of its processes.

    The command gets SIGTERM first, and SIGKILL after :data:`PATIENCE` seconds, or if this process is killed.

    Returns:
        Exit code: 0 after a signal, 1 if the command ended by itself.
    """
    ended: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        ended.append(number)
        for process in started:
            process.terminate()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    with start_with_guard(command, environment, umask=PRIVATE) as process:
        started.append(process)
        while process.poll() is None and not ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE if ended else 0)
    for number, handler in before.items():
        signal.signal(number, handler)
    return 0 if ended else 1


@contextlib.contextmanager
def start_with_guard(
    command: Sequence[str], environment: Mapping[str, str], *, umask: int = -1, cwd: Path | None = None
) -> "Iterator[subprocess.Popen[bytes]]":
    """Start a command, all of whose processes are killed at the end of the context, or with this process.

    Args:
        command: Command.
        environment: Environment variables.
        umask: File mode creation mask; -1 for that of this process.
        cwd: Working directory; None for that of this process.
    """
    life, guard = socket.socketpair()
    with life, guard:
        process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(guard.fileno()), *command],
            pass_fds=(guard.fileno(),),
            env=environment,
            start_new_session=True,
            umask=umask,
            cwd=cwd,
        )
        guard.close()
        try:
            yield process
        finally:
            life.close()
            process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """Result of a program.

    Args:
        ending: Reason of the end.
        code: Exit code; 128 plus the signal number if a signal ended it.
        stdout: Standard output, cut at the limit.
        stderr: Standard error, cut at the limit.
        seconds: Run time, including the start.
    """

    ending: Ending
    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def ok(self) -> bool:
        """True if the program exited with code 0."""
        return self.ending == "exited" and self.code == 0


def run_with_limits(
    command: Sequence[str],
    stdin: str,
    *,
    seconds: float,
    output: int,
    env: Mapping[str, str],
    keep: Sequence[int] = (),
) -> SandboxResult:
    """Run a command in a new session, without a terminal; its output is a file in memory.

    Args:
        command: Command, which ends its own descendants.
        stdin: Standard input.
        seconds: Limit of time.
        output: Maximum number of bytes of the output.
        env: Environment variables.
        keep: Descriptors that the command inherits.
    """
    begin, ending = time.monotonic(), "exited"
    with _memory_file() as out, _memory_file() as err:
        with subprocess.Popen(
            command,
            pass_fds=keep,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            cwd="/",
            env=env,
            start_new_session=True,
        ) as process:
            try:
                process.communicate(stdin.encode(errors="replace"), seconds)
            except subprocess.TimeoutExpired:
                ending = "too long"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        taken = time.monotonic() - begin
        if os.fstat(out.fileno()).st_size + os.fstat(err.fileno()).st_size > output:
            ending = "too much output"
        texts = [os.pread(file.fileno(), output, 0).decode(errors="replace") for file in (out, err)]
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return SandboxResult(ending=ending, code=code, stdout=texts[0], stderr=texts[1], seconds=taken)


def _memory_file() -> IO[bytes]:
    """Return an empty file in memory that other users may not open."""
    descriptor = os.memfd_create("output")
    os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "r+b", buffering=0)
