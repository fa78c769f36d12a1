"""Command that ends with this process."""

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from lightning_rl.processes.pool import WORKER

PRIVATE = 0o077  # umask: sockets and files are for this user only
PATIENCE = 10.0  # seconds between SIGTERM and SIGKILL


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
    life, guard = socket.socketpair()
    with life, guard:
        process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(guard.fileno()), *command],
            pass_fds=(guard.fileno(),),
            env=environment,
            start_new_session=True,
            umask=PRIVATE,
        )
        started.append(process)
        guard.close()
        while process.poll() is None and not ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE if ended else 0)
    process.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    return 0 if ended else 1
