"""Sandbox for untrusted code: limits on time, memory, output, processes and files, and no network.

The isolation is that of bubblewrap, a program that starts another one in new Linux namespaces.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import IO, NamedTuple

import cloudpickle
from packaging.requirements import Requirement

from lightning_rl.processes.command import SandboxResult, run_with_limits
from lightning_rl.processes.errors import CallError
from lightning_rl.processes.pool import Pool
from lightning_rl.processes.ray_pool import RayWorkers, pool_of
from lightning_rl.utils.arguments import check_counts, check_numbers, check_texts
from lightning_rl.utils.naming import in_words

CURE = (
    "install bubblewrap 0.8 or newer with `apt install bubblewrap` and allow user namespaces (in a container: "
    "--security-opt seccomp=unconfined and systempaths=unconfined; on a machine: sysctl user.max_user_namespaces and "
    "kernel.apparmor_restrict_unprivileged_userns=0), or send the programs to a SandboxService"
)
PATH = "/usr/local/bin:/usr/bin:/bin"
TOOLS = ("bwrap", "setpriv", "prlimit", "ldd")
HOME, MAIN = "/sandbox", "/sandbox/main.py"  # inside
PACKAGES = ("numpy", "pytest")
PATIENCE = 60.0  # seconds of a program on a worker beyond its limit
SHARED = ("/etc/ld.so.cache", "/usr/lib/locale/C.utf8", "/usr/share/zoneinfo")  # files of the system, where they exist
LINKS = ("/bin", "/lib", "/lib64", "/sbin", "/usr/lib64")  # where they are links
LIBRARY = re.compile(r"(/\S+) \(0x", re.ASCII)  # in the output of ldd


class SandboxUnavailable(RuntimeError):  # noqa: N818
    """This machine or service cannot run a program in isolation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Runs Python programs, each in its own Linux namespaces of processes, network, files and users.

    A program sees the interpreter with its standard library, the shared libraries of the system and some packages,
    read-only, and one writable folder in memory. It has no network but an empty localhost. Background processes and
    files disappear with it. Needs Linux and bubblewrap.

    Args:
        seconds: Limit of wall-clock time, and of CPU time of each process.
        memory: Address space of each process in bytes.
        output: Maximum size of the output in bytes.
        processes: Maximum number of processes and threads.
        disk: Maximum size of written files in bytes.
        workers: Workers of a Ray cluster on which the programs run, if each node can isolate programs; None for this
            machine. Set ``parallel`` of ``CodeTests`` to their number.
        packages: Names of installed distributions that a program can import, such as ``"pandas"``, with their
            dependencies. Those of the default may be missing.

    Raises:
        ValueError: If a limit is out of range, or a package is not installed.
    """

    seconds: float = 5.0
    memory: int = 2**29
    output: int = 2**16
    processes: int = 16
    disk: int = 2**24
    packages: tuple[str, ...] = PACKAGES
    workers: RayWorkers | None = None

    def __post_init__(self) -> None:  # noqa: D105
        check_numbers(above=0, finite=True, seconds=self.seconds)
        check_counts(1, memory=self.memory, output=self.output, processes=self.processes, disk=self.disk)
        check_texts(packages=self.packages)
        object.__setattr__(self, "packages", tuple(self.packages))
        if missing := [name for name in self.packages if name not in PACKAGES and not _distributions([name])]:
            raise ValueError(
                f"expected installed packages, got {in_words(missing)}: install them, or correct packages="
            )

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
            SandboxUnavailable: If this machine, or that of the worker, cannot isolate programs.
        """
        if self.workers is not None:
            return self._run_elsewhere(source, stdin)
        if missing := [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]:
            raise SandboxUnavailable(
                f"expected a machine that can isolate programs, got no {in_words(missing)}: {CURE}"
            )
        with tempfile.TemporaryFile() as program, tempfile.TemporaryFile() as status, tempfile.TemporaryFile() as info:
            program.write(source.encode(errors="replace"))
            program.seek(0)
            descriptors = program.fileno(), status.fileno()
            python = _python(self.packages)
            command = [*_as_unused_user(python), *self._bubblewrap(python, *descriptors), *self._program(python)]
            command[1:1] = ["--info-fd", str(info.fileno())]
            try:
                result = run_with_limits(
                    command,
                    stdin,
                    seconds=self.seconds,
                    output=self.output,
                    env=_environment(python),
                    keep=(*descriptors, info.fileno()),
                )
            finally:
                _reap(info)
            status.seek(0)
            if result.ending == "exited" and b"exit-code" not in status.read():  # which bubblewrap writes if it ran
                reason = result.stderr.strip() or f"exit code {result.code} of bubblewrap"
                raise SandboxUnavailable(f"expected a machine that can isolate programs, got {reason}: {CURE}")
        return result

    def _run_elsewhere(self, source: str, stdin: str) -> SandboxResult:
        try:
            task = cloudpickle.dumps(((source, stdin), {}))
            return _pool_of(self).submit(task, self.seconds + PATIENCE).result()
        except CallError as error:
            known = error.kind == SandboxUnavailable.__name__
            raise SandboxUnavailable(error.message if known else str(error)) from error

    def _bubblewrap(self, python: "Python", program: int, status: int) -> list[str]:
        """Return the command that isolates the command after it."""
        command = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--new-session", "--die-with-parent"]
        command += python.mounts
        if "/tmp" not in command:  # unless it is the parent of a folder
            command += ["--symlink", HOME, "/tmp"]
        command += ["--proc", "/proc", "--dev", "/dev", "--size", str(self.disk), "--tmpfs", HOME]
        command += ["--file", str(program), MAIN, "--chdir", HOME]
        for path in ("/dev", *python.hidden, "/"):
            command += ["--remount-ro", path]
        return [*command, "--json-status-fd", str(status), "--"]

    def _program(self, python: "Python") -> list[str]:
        """Return the command of the program within its limits."""
        limits = {"as": self.memory, "cpu": int(self.seconds) + 1, "nofile": 64, "core": 0}
        limits["fsize"] = max(self.disk, self.output + 1)  # the output is a file
        limits["nproc"] = self.processes + 1  # with process 1, which is bubblewrap
        options = [f"--{name}={limit}" for name, limit in limits.items()]
        return [python.limiter, *options, "--", python.executable, "-s", "-P", "-B", MAIN]


class Python(NamedTuple):
    """Interpreter as a program sees it.

    Attributes:
        executable: Path of the interpreter, outside of a virtual environment.
        limiter: Path of ``prlimit``.
        mounts: Options of bubblewrap that show the files of interpreter and packages, read-only.
        hidden: Folders within the standard library that hide packages.
        path: Folders of the packages.
        sources: Paths of the files.
    """

    executable: str
    limiter: str
    mounts: tuple[str, ...]
    hidden: tuple[str, ...]
    path: tuple[str, ...]
    sources: tuple[str, ...]


def _as_unused_user(python: Python) -> list[str]:
    """Return the command that switches root to an unused user, because limits on processes do not hold for root.

    The folders are mounted before, because that user may not be allowed to open them. The namespace of processes ends
    that user's processes with the trainer.
    """
    if os.geteuid() != 0:
        return []
    uid = 20_000 + secrets.randbelow(40_000)
    folders = [
        "/usr",
        *map(os.path.realpath, (sys.prefix, sys.base_prefix, *(path for path in LINKS if Path(path).exists()))),
    ]
    binds = _binds(_outermost([*folders, *python.sources]))
    mounts = ["bwrap", "--unshare-pid", "--die-with-parent", *binds, *_links(), "--dir", "/tmp"]
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


@cache
def _python(packages: tuple[str, ...]) -> Python:
    """Return the interpreter of this process with its shared libraries and some packages.

    The files of a virtual environment are not among them, because its folder may be that of a project.
    """
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    limiter = os.path.realpath(shutil.which("prlimit", path=PATH) or "prlimit")
    platform = {"platbase": sys.base_exec_prefix}
    paths = (sysconfig.get_path(name, "posix_prefix", platform) for name in ("stdlib", "platstdlib"))
    standard = list(dict.fromkeys(map(os.path.realpath, paths)))
    items = [item for distribution in _distributions(packages) for item in _items(distribution)]
    folders = [Path(folder, "lib-dynload") for folder in standard] + [Path(item) for item in items]
    compiled = [str(file) for folder in folders for file in folder.rglob("*.so*") if "_tkinter" not in file.name]
    shown = [executable, limiter, *standard, *items, *(path for path in SHARED if Path(path).exists())]
    shown += set(_libraries([executable, limiter, *compiled])).difference(compiled)
    inner = [f"{folder}/{name}" for folder in standard for name in ("site-packages", "dist-packages")]
    hidden = [folder for folder in inner if Path(folder).is_dir()]
    covers = [option for folder in hidden for option in ("--tmpfs", folder)]
    within = [item for item in items if item.startswith(tuple(f"{folder}/" for folder in hidden))]
    mounts = [*_binds(_outermost(shown)), *covers, *_binds(within), *_links()]
    path = dict.fromkeys(str(Path(item).parent) for item in items)
    return Python(executable, limiter, tuple(mounts), tuple(hidden), tuple(path), tuple(shown))


def _libraries(files: Sequence[str]) -> list[str]:
    """Return the shared libraries that executables and libraries load.

    The folder of the C library, with the libraries of the system, is one of them, because each mount takes time.
    """
    output = subprocess.run([str(shutil.which("ldd", path=PATH)), *files], capture_output=True, text=True, check=False)
    paths = [Path(os.path.normpath(path)) for path in dict.fromkeys(LIBRARY.findall(output.stdout))]
    paths = [path.parent.resolve() / path.name for path in paths]
    return [str(path.parent if path.name.startswith("libc.so") else path) for path in paths]


def _distributions(names: Sequence[str]) -> list[metadata.Distribution]:
    """Return the installed distributions of some names, with their dependencies."""
    found: dict[str, metadata.Distribution] = {}
    names = list(names)
    for name in names:  # which grows
        with contextlib.suppress(metadata.PackageNotFoundError):
            if name not in found:
                found[name] = metadata.distribution(name)
                needs = map(Requirement, found[name].requires or ())
                names += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return list(found.values())


def _items(distribution: metadata.Distribution) -> Iterator[str]:
    """Yield the modules and folders of a distribution."""
    listed = (distribution.read_text("top_level.txt") or distribution.name).split()
    names = {*listed, *(f"{name}.py" for name in listed)}
    if distribution.files:  # None for packages of Debian
        names = {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}
    for name in sorted(names):
        if (path := Path(str(distribution.locate_file(name)))).exists():
            yield str(path.resolve())


def _outermost(paths: Iterable[str]) -> list[str]:
    """Return the paths that are in no other of the paths."""
    kept: list[str] = []
    for path in sorted(set(paths), key=len):
        if not any(path.startswith(f"{folder}/") for folder in kept):
            kept.append(path)
    return kept


def _binds(paths: Sequence[str]) -> list[str]:
    """Return the options of bubblewrap that show paths, read-only."""
    parents = dict.fromkeys(str(parent) for path in paths for parent in reversed(Path(path).parents[:-1]))
    options = [option for parent in parents for option in ("--dir", parent)]  # or bubblewrap makes them private to root
    return [*options, *(option for path in paths for option in ("--ro-bind", path, path))]


def _links() -> list[str]:
    """Return the options of bubblewrap for the links to folders of libraries and programs."""
    links = [Path(path) for path in LINKS if Path(path).is_symlink()]
    return [option for path in links for option in ("--symlink", str(path.readlink()), str(path))]


def _environment(python: Python) -> dict[str, str]:
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    return {
        "PATH": PATH,
        "HOME": HOME,
        "TMPDIR": HOME,
        "LANG": "C.UTF-8",
        "PYTHONPATH": ":".join(python.path),
        **threads,
    }


POOLS: dict[Sandbox, Pool] = {}  # of sandboxes on workers


def _pool_of(sandbox: Sandbox) -> Pool:
    if sandbox in POOLS:
        return POOLS[sandbox]
    local = replace(sandbox, workers=None)
    return POOLS.setdefault(sandbox, pool_of(cloudpickle.dumps(local.run), sandbox.workers or 1))


def close_sandboxes() -> None:
    """End the processes of all sandboxes on workers; the next program starts new ones."""
    for pool in POOLS.values():
        pool.close()


@cache
def _check(sandbox: Sandbox) -> None:
    result = sandbox.run("print(4)")
    if not result.ok:  # the machine may be busy
        result = sandbox.run("print(4)")
    if not result.ok or result.stdout != "4\n":
        raise ValueError(f"expected limits under which Python prints a digit, got {result} of {sandbox}: raise a limit")
