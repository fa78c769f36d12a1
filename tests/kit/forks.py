"""Scripts in forks of processes that have imported the library, because the import takes six CPU-seconds.

Each rank has its own parent process. Parents differ in their hash seeds, as ranks of torchrun do, so that a collective
that depends on the order of a set fails. Run as a script, this file is such a parent.
"""

import atexit
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

PATH = os.pathsep.join(str(folder) for folder in Path(__file__).parents[1:3])


class Fork:
    """A script in a fork, with the methods of ``subprocess.Popen`` that its caller needs.

    Args:
        rank: Rank whose parent process is forked.
        command: Script and arguments.
        environment: All environment variables of the fork.
        output: File for its standard output and error.
    """

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        process = _parent(rank)
        self._code: int | None = None
        assert process.stdin is not None and process.stdout is not None
        task = {"command": command, "environment": environment, "output": str(output), "folder": str(Path.cwd())}
        process.stdin.write(json.dumps(task).encode() + b"\n")
        self._said = process.stdout
        self.pid = int(self._said.readline())

    def poll(self) -> int | None:
        """Return the exit code; None while the fork runs."""
        if self._code is None and select.select([self._said], [], [], 0)[0]:
            self._code = int(self._said.readline())
        return self._code

    def kill(self) -> None:
        """End the fork with SIGKILL."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # ended since poll()
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for the end of the fork and return its exit code.

        Raises:
            TimeoutError: After ``timeout`` seconds.
        """
        if self._code is None:
            if not select.select([self._said], [], [], max(timeout, 1.0))[0]:
                raise TimeoutError(f"expected process {self.pid} to end within {timeout:g} seconds")
            self._code = int(self._said.readline())
        return self._code


@cache
def _parent(rank: int) -> "subprocess.Popen[bytes]":
    """Return the parent process of a rank; Lightning reads the rank when it is imported."""
    process = subprocess.Popen(
        [sys.executable, __file__], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PATH, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    atexit.register(process.communicate)  # closes its input, which ends it
    return process


def main() -> None:
    """Import the library, then fork for each line of the standard input, one at a time."""
    import lightning_rl.callbacks
    import lightning_rl.module  # noqa: F401

    for line in sys.stdin:
        if not (pid := os.fork()):
            run(**json.loads(line))
            return
        print(pid, flush=True)  # noqa: T201
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)  # noqa: T201


def run(command: Sequence[str], environment: Mapping[str, str], output: str, folder: str) -> None:
    """Run the script in this process."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for path, flags, targets in ((os.devnull, os.O_RDONLY, [0]), (output, os.O_WRONLY | os.O_APPEND, [1, 2])):
        descriptor = os.open(path, flags)
        for target in targets:
            os.dup2(descriptor, target)
        os.close(descriptor)
    sys.argv[:], sys.path[0] = command, str(Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
