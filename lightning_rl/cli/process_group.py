"""Process group of a command that ends with this process. Uses the standard library only."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType

PRIVATE = 0o077  # umask: sockets and files are for this user only
PATIENCE = 10.0  # seconds between SIGTERM and SIGKILL
GUARD = "import os, signal, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), signal.SIGKILL)"


def run_group(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command until it ends or SIGINT or SIGTERM arrives, then end all of its processes.

    If this process is killed by SIGKILL, a guard process kills the group.

    The command gets SIGTERM first, and SIGKILL after :data:`PATIENCE` seconds.

    Returns:
        Exit code: 0 after a signal, 1 if the command ended by itself.
    """
    ended: list[int] = []
    leaders: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        ended.append(number)
        for leader in leaders:
            _signal_group(leader, signal.SIGTERM)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    server = subprocess.Popen(command, env=environment, start_new_session=True, umask=PRIVATE)
    guard = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", GUARD, str(server.pid)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    leaders.append(server.pid)
    try:
        while server.poll() is None and not ended:
            with suppress(subprocess.TimeoutExpired):
                server.wait(PATIENCE)
    finally:
        with suppress(subprocess.TimeoutExpired):
            server.wait(PATIENCE if ended else 0)
        _signal_group(server.pid, signal.SIGKILL)
        server.wait()
        guard.communicate()  # closes its stdin, so it finds an empty group and ends
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0 if ended else 1


def _signal_group(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, number)
