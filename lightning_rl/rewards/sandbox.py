"""Sandbox for untrusted code: limits on time, memory, output, processes and files, and no network."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal

from lightning_rl.utils.arguments import check_bools, check_counts, check_numbers

JAIL = Path(__file__).with_name("namespaces.py")
CURE = (
    "allow namespaces for this user (in a container: the capability SYS_ADMIN, or user namespaces in its seccomp "
    "profile; on a machine: sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone=1 and "
    "kernel.apparmor_restrict_unprivileged_userns=0), or run the code without protection with Sandbox(unsafe=True)"
)

UNITS = {"seconds": "s", "memory": "bytes", "output": "bytes", "processes": "processes", "disk": "bytes"}
Ending = Literal["exited", "too long", "too much output"]


class SandboxUnavailable(RuntimeError):  # noqa: N818
    """This machine or service cannot run a program in isolation."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Runs Python programs, each in its own Linux namespaces of processes, network, files and users.

    A program sees the interpreter with its packages, read-only, and one writable folder in memory. It has no network,
    not even localhost. Background processes and files disappear with it. Linux only.

    Args:
        seconds: Limit of wall-clock time, and of CPU time of each process.
        memory: Address space of each process in bytes.
        output: Maximum size of the output in bytes.
        processes: Maximum number of processes and threads.
        disk: Maximum size of written files in bytes.
        unsafe: Run without namespaces where they are not available. The limits on time, memory, output and file size
            hold, but the program has your permissions, and its background processes may survive.

    Raises:
        ValueError: If a limit is out of range.
    """

    seconds: float = 5.0
    memory: int = 2**29
    output: int = 2**16
    processes: int = 16
    disk: int = 2**24
    unsafe: bool = False

    def __post_init__(self) -> None:  # noqa: D105
        check_numbers(above=0, finite=True, seconds=self.seconds)
        check_counts(1, memory=self.memory, output=self.output, processes=self.processes, disk=self.disk)
        check_bools(unsafe=self.unsafe)

    def check(self) -> None:
        """Run a test program, once per process.

        Raises:
            ValueError: If no program can run within the limits; the message names the limit.
            SandboxUnavailable: If this machine cannot isolate programs; the message names the fix.
        """
        if not self.unsafe and (reason := _missing()):
            raise SandboxUnavailable(f"expected a machine that can isolate programs, got {reason}: {CURE}")
        if fault := _too_tight(self):
            raise ValueError(fault)

    def run(self, source: str, stdin: str = "") -> SandboxResult:
        """Run a Python program.

        Args:
            source: Source code of the program.
            stdin: Standard input of the program.

        Raises:
            SandboxUnavailable: If this machine cannot isolate programs.
            ValueError: If an argument is not a string or has lone surrogates.
        """
        check_program(source, stdin)
        with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
            result, reason = self._run_in(folder, source, stdin)
        if reason:
            raise SandboxUnavailable(f"expected a machine that can isolate programs, got {reason}: {CURE}")
        return result

    def _run_in(self, folder: str, source: str, stdin: str) -> tuple[SandboxResult, str]:
        """Return the result and the setup error, if any."""
        begin, main = time.monotonic(), Path(folder, "main.py")
        if self.unsafe:
            main.write_text(source, encoding="utf-8")
        options = {
            "root": folder,
            "binds": _interpreter(),
            "source": source,
            "command": [sys.executable, "-I", "-B", str(main) if self.unsafe else "/sandbox/main.py"],
            "environment": _environment(folder if self.unsafe else "/sandbox"),
            "seconds": self.seconds,
            "memory": self.memory,
            "processes": self.processes,
            "disk": self.disk,
            "unsafe": self.unsafe,
        }
        with tempfile.TemporaryFile() as configuration:
            configuration.write(json.dumps(options).encode())
            configuration.seek(0)
            status, theirs = os.pipe()
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(JAIL), str(configuration.fileno()), str(theirs)],
                pass_fds=(configuration.fileno(), theirs),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder if self.unsafe else "/",
                start_new_session=self.unsafe,
            )
            os.close(theirs)
        with os.fdopen(status, "rb") as answers, process:
            try:
                ending, out, err = _talk(process, stdin.encode(), begin + self.seconds, self.output)
            finally:
                _kill(process, group=self.unsafe)
            process.wait()
            reason = "" if self.unsafe else answers.read().decode()
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        texts = [part.decode(errors="replace") for part in (out, err)]
        seconds = time.monotonic() - begin
        return SandboxResult(ending=ending, code=code, stdout=texts[0], stderr=texts[1], seconds=seconds), reason


def check_program(source: Any, stdin: Any) -> None:
    """Check that the arguments can be written to a file and a pipe.

    Raises:
        ValueError: If an argument is not a string or has lone surrogates.
    """
    for name, text in {"source": source, "stdin": stdin}.items():
        if not isinstance(text, str) or has_halves(text):
            raise ValueError(f"expected {name} to be a string without lone surrogates, got {text!r:.200}")


def has_halves(text: str) -> bool:
    """Return True if a text has lone surrogates, which cannot be encoded."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _kill(process: "subprocess.Popen[bytes]", *, group: bool) -> None:
    try:
        if group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    except ProcessLookupError:
        pass


def _talk(process: "subprocess.Popen[bytes]", stdin: bytes, end: float, limit: int) -> tuple[Ending, bytes, bytes]:
    """Write stdin and read the output until its end, the time limit or the size limit."""
    streams = {process.stdout: bytearray(), process.stderr: bytearray()}
    threading.Thread(target=_write, args=(process.stdin, stdin), daemon=True).start()
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)  # pyright: ignore[reportArgumentType]
        ending = _read(process, selector, streams, end, limit)
    while ending is None and process.poll() is None:
        ending = "too long" if time.monotonic() >= end else None
        time.sleep(0.002)
    out, err = (bytes(part[:limit]) for part in streams.values())
    return ending or "exited", out, err


def _read(
    process: "subprocess.Popen[bytes]",
    selector: selectors.BaseSelector,
    streams: Mapping[Any, bytearray],
    end: float,
    limit: int,
) -> Ending | None:
    """Read to the end and return None, else return the limit that was hit."""
    while selector.get_map():
        ready = selector.select(min(max(end - time.monotonic(), 0.0), 0.1))
        for key, _ in ready:
            chunk = os.read(key.fd, 65536)
            streams[key.fileobj].extend(chunk)
            if not chunk:
                selector.unregister(key.fileobj)
        if sum(map(len, streams.values())) > limit:
            return "too much output"
        if time.monotonic() >= end:
            return "too long"
        if not ready and process.poll() is not None:
            break  # without isolation, a background process may hold the pipe open
    return None


def _write(stream: IO[bytes], data: bytes) -> None:
    """Write and close; the program may have ended without reading."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(data)
    with contextlib.suppress(OSError, ValueError):
        stream.close()


@cache
def _interpreter() -> list[str]:
    """Return the folders that Python needs, without nested ones."""
    real = [os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, "/usr")]
    paths = sorted({*real, sys.base_prefix, sys.prefix, "/usr"}, key=len)
    kept: list[str] = []
    for path in paths:
        if Path(path).is_dir() and not any(path.startswith(f"{k}/") for k in kept):
            kept.append(path)
    return [*kept, *(path for path in ("/etc/ld.so.cache",) if Path(path).is_file())]


def _environment(home: str) -> dict[str, str]:
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "PYTHONIOENCODING": "utf-8",
        **threads,
    }


@cache
def _too_tight(sandbox: Sandbox) -> str:
    """Return the limits within which a minimal program fails, as an error message, or an empty string."""
    if any(_runs(sandbox) for _ in range(3)):  # retry, since the machine may be busy
        return ""
    roomy = Sandbox(seconds=max(30.0, sandbox.seconds), unsafe=sandbox.unsafe)
    limits = {name: getattr(sandbox, name) for name in ("seconds", "memory", "output", "processes", "disk")}
    named = [name for name, limit in limits.items() if name != "seconds" and not _runs(replace(roomy, **{name: limit}))]
    tight = ", ".join(f"{name}={limits[name]} {UNITS[name]}" for name in named or ["seconds"])
    return f"expected limits under which Python starts and prints a digit, got a Sandbox with {tight}: raise that limit"


def _runs(sandbox: Sandbox) -> bool:
    result = sandbox.run("print(4)")
    return result.ok and result.stdout == "4\n"


@cache
def _missing() -> str:
    """Return the reason why this machine cannot isolate programs, or an empty string."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform}, which has no namespaces"
    try:
        result = Sandbox(seconds=30.0).run("print(2 + 2)")
    except SandboxUnavailable as error:
        return str(error).partition(", got ")[2].partition(": allow namespaces")[0]
    return "" if result.ok and result.stdout == "4\n" else f"a program that ended with {result.code}: {result.stderr}"
