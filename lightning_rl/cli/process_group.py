"""A command as a process group of its own, which never outlives this process. Needs the standard library alone."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType

PRIVATE = 0o077  # no other user may open what it makes: sockets and files
PATIENCE = 10.0  # seconds that vLLM has to end by itself
GUARD = "import os, signal, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), signal.SIGKILL)"


def run_group(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a command until it ends, or SIGINT or SIGTERM comes; then all processes that it has started end.

    If this process is killed by SIGKILL, a second one, which does nothing but wait for that, kills the group.

    Args:
        command: what to run; it gets SIGTERM first, and SIGKILL after :data:`PATIENCE` seconds.
        environment: of the command.

    Returns:
        The exit code: 0 after a signal, 1 if the command ended by itself.
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
        guard.communicate()  # its end of the pipe is closed, so it finds an empty group and ends
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0 if ended else 1


def _signal_group(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, number)
