"""Sandbox for untrusted code: limits on time, memory, output, processes and files, and no network.

The isolation is that of bubblewrap, a program that starts another one in new Linux namespaces.
"""

import contextlib
import json
import os
import secrets
import shutil
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

from lightning_rl.processes.command import SandboxResult, run_with_limits
from lightning_rl.utils.arguments import check_counts, check_numbers
from lightning_rl.utils.naming import in_words

CURE = (
    "install bubblewrap 0.8 or newer with `apt install bubblewrap` and allow user namespaces (in a container: "
    "--security-opt seccomp=unconfined and systempaths=unconfined; on a machine: sysctl user.max_user_namespaces and "
    "kernel.apparmor_restrict_unprivileged_userns=0), or send the programs to a SandboxService"
)
PATH = "/usr/local/bin:/usr/bin:/bin"
TOOLS = ("bwrap", "setpriv", "prlimit")
HOME, MAIN = "/sandbox", "/sandbox/main.py"  # inside


class SandboxUnavailable(RuntimeError):  # noqa: N818
    """This machine or service cannot run a program in isolation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Runs Python programs, each in its own Linux namespaces of processes, network, files and users.

    A program sees the interpreter with its packages, read-only, and one writable folder in memory. It has no network
    but an empty localhost. Background processes and files disappear with it. Needs Linux and bubblewrap.

    Args:
        seconds: Limit of wall-clock time, and of CPU time of each process.
        memory: Address space of each process in bytes.
        output: Maximum size of the output in bytes.
        processes: Maximum number of processes and threads.
        disk: Maximum size of written files in bytes.

    Raises:
        ValueError: If a limit is out of range.
    """

    seconds: float = 5.0
    memory: int = 2**29
    output: int = 2**16
    processes: int = 16
    disk: int = 2**24

    def __post_init__(self) -> None:  # noqa: D105
        check_numbers(above=0, finite=True, seconds=self.seconds)
        check_counts(1, memory=self.memory, output=self.output, processes=self.processes, disk=self.disk)

    def check(self) -> None:
        """Run a test program, once per process.

        Raises:
            ValueError: If no program can run within the limits.
            SandboxUnavailable: If this machine cannot isolate programs; the message names the fix.
        """
        _check(self)

    def run(self, source: str, stdin: str = "") -> SandboxResult:
        """Run a Python program.

        Args:
            source: Source code of the program.
            stdin: Standard input of the program.

        Raises:
            SandboxUnavailable: If this machine cannot isolate programs.
        """
        if missing := [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]:
            raise SandboxUnavailable(
                f"expected a machine that can isolate programs, got no {in_words(missing)}: {CURE}"
            )
        with tempfile.TemporaryFile() as program, tempfile.TemporaryFile() as status, tempfile.TemporaryFile() as info:
            program.write(source.encode(errors="replace"))
            program.seek(0)
            descriptors = program.fileno(), status.fileno()
            command = [*_as_unused_user(), *self._bubblewrap(*descriptors), *self._program()]
            command[1:1] = ["--info-fd", str(info.fileno())]
            try:
                result = run_with_limits(
                    command,
                    stdin,
                    seconds=self.seconds,
                    output=self.output,
                    env=_environment(),
                    keep=(*descriptors, info.fileno()),
                )
            finally:
                _reap(info)
            status.seek(0)
            if result.ending == "exited" and b"exit-code" not in status.read():  # which bubblewrap writes if it ran
                reason = result.stderr.strip() or f"exit code {result.code} of bubblewrap"
                raise SandboxUnavailable(f"expected a machine that can isolate programs, got {reason}: {CURE}")
        return result

    def _bubblewrap(self, program: int, status: int) -> list[str]:
        """Return the command that isolates the command after it."""
        command = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--new-session", "--die-with-parent"]
        command += _folders()
        if "/tmp" not in command:  # unless it is the parent of a folder
            command += ["--symlink", HOME, "/tmp"]
        command += ["--proc", "/proc", "--dev", "/dev", "--size", str(self.disk), "--tmpfs", HOME]
        command += ["--file", str(program), MAIN, "--chdir", HOME, "--remount-ro", "/dev", "--remount-ro", "/"]
        return [*command, "--json-status-fd", str(status), "--"]

    def _program(self) -> list[str]:
        """Return the command of the program within its limits."""
        limits = {"as": self.memory, "cpu": int(self.seconds) + 1, "nofile": 64, "core": 0}
        limits["fsize"] = max(self.disk, self.output + 1)  # the output is a file
        limits["nproc"] = self.processes + 1  # with process 1, which is bubblewrap
        options = [f"--{name}={limit}" for name, limit in limits.items()]
        return ["prlimit", *options, "--", _interpreter(), "-I", "-B", MAIN]


def _as_unused_user() -> list[str]:
    """Return the command that switches root to an unused user, because limits on processes do not hold for root.

    The folders are mounted before, because that user may not be allowed to open them. The namespace of processes ends
    that user's processes with the trainer.
    """
    if os.geteuid() != 0:
        return []
    uid = 20_000 + secrets.randbelow(40_000)
    mounts = ["bwrap", "--unshare-pid", "--die-with-parent", *_folders(), "--dir", "/tmp"]
    mounts += ["--bind", "/proc", "/proc", "--dev-bind", "/dev", "/dev", "--"]
    return [*mounts, "setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]


def _reap(info: IO[bytes]) -> None:
    """Reap the process that bubblewrap started, if this one adopts orphans, as process 1 of a container does.

    Args:
        info: File that bubblewrap wrote for ``--info-fd``.
    """
    info.seek(0)
    with contextlib.suppress(ValueError, LookupError, ChildProcessError):
        os.waitpid(json.load(info)["child-pid"], 0)


def _interpreter() -> str:
    """Return the path of this Python in the folders that a program sees; it may have been started by another path."""
    if sys.prefix == sys.base_prefix:
        return os.path.realpath(sys.executable)
    return str(Path(sys.prefix, "bin", Path(sys.executable).name))


@cache
def _folders() -> tuple[str, ...]:
    """Return the options of bubblewrap that show the folders that Python needs, read-only."""
    real = [os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, "/usr")]
    kept: list[str] = []
    for path in sorted({*real, sys.base_prefix, sys.prefix, "/usr"}, key=len):
        if not any(path.startswith(f"{folder}/") for folder in kept):
            kept.append(path)
    options: list[str] = []
    for path in (*kept, "/bin", "/lib", "/lib64", "/sbin", "/etc/ld.so.cache"):
        for parent in reversed(Path(path).parents[:-1]):  # bubblewrap would make them private to root
            options += ["--dir", str(parent)]
        if path not in kept and Path(path).is_symlink():
            options += ["--symlink", str(Path(path).readlink()), path]
        else:
            options += ["--ro-bind-try", path, path]
    return tuple(options)


def _environment() -> dict[str, str]:
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    return {
        "PATH": PATH,
        "HOME": HOME,
        "TMPDIR": HOME,
        "LANG": "C.UTF-8",
        "PYTHONIOENCODING": "utf-8",
        **threads,
    }


@cache
def _check(sandbox: Sandbox) -> None:
    result = sandbox.run("print(4)")
    if not result.ok:  # the machine may be busy
        result = sandbox.run("print(4)")
    if not result.ok or result.stdout != "4\n":
        raise ValueError(f"expected limits under which Python prints a digit, got {result} of {sandbox}: raise a limit")
