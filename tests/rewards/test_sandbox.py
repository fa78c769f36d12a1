"""Sandbox: each attack is contained, and a small form of it succeeds without the sandbox."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.forks import PATH
from kit.marks import gone, pids_with, wait_for
from kit.skips import need_sandbox

from lightning_rl.rewards import Sandbox, SandboxResult, SandboxUnavailable, sandbox


class Open:
    """Runs programs without a sandbox, to show what it changes."""

    def run(self, source: str) -> SandboxResult:
        """Run a program in an empty folder."""
        command = [sys.executable, "-c", source]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        return SandboxResult(ending="exited", code=done.returncode, stdout=done.stdout, stderr=done.stderr, seconds=0.0)


OPEN = Open()


@pytest.fixture(autouse=True)
def _available() -> None:
    need_sandbox()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, list[Any]]]:
    """The port of a server on loopback, and the connections that it had."""
    seen: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            while True:
                try:
                    connection, address = listening.accept()
                except OSError:
                    return
                seen.append(address)
                connection.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listening.getsockname()[1], seen
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def test_a_program_reads_computes_and_prints() -> None:
    result = Sandbox().run("import sys\nprint(int(sys.stdin.read()) + 2)\nsys.stderr.write('heard')", "40")
    assert (result.ok, result.stdout, result.stderr, result.ending) == (True, "42\n", "heard", "exited")
    assert Sandbox().run("import numpy; print(numpy.arange(3).sum())").stdout == "3\n", (
        "with the packages of this Python"
    )
    assert Sandbox().run("raise SystemExit(3)").code == 3
    assert Sandbox().run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)").code == 128 + 11
    assert Sandbox(output=2**20).run("import sys; print(len(sys.stdin.read()))", "x" * 300_000).stdout == "300000\n"
    assert Sandbox().run("pass", "x" * 300_000).ok


def test_a_file_outside_can_neither_be_read_nor_written(tmp_path: Path) -> None:
    secret, target = tmp_path / "secret", tmp_path / "target"
    secret.write_text("told")
    read, write = f"print(open({str(secret)!r}).read())", f"open({str(target)!r}, 'w').write('x')"
    assert OPEN.run(read).stdout == "told\n" and OPEN.run(write).ok and target.exists()
    target.unlink()
    assert "FileNotFoundError" in Sandbox().run(read).stderr
    assert not Sandbox().run(write).ok and not target.exists()
    assert "Read-only file system" in Sandbox().run("open('/here', 'w')").stderr
    library = f"open({tempfile.__file__!r}, 'a')"
    assert not Sandbox().run(library).ok, "what it needs it sees, and cannot change"
    assert (
        Sandbox().run("import os; print(os.path.exists('/etc/passwd'), os.listdir('/dev'))").stdout.startswith("False")
    )


PROJECT = """
import sys
from pathlib import Path
from lightning_rl.rewards import Sandbox

secrets = [Path(sys.prefix, ".env"), Path(sys.prefix, "lib", "answers.json"), Path("/usr/share/doc"), Path("/usr/src")]
for secret in secrets[:2]:
    secret.write_text("42")
program = f"import numpy, os, pytest; print([path for path in {list(map(str, secrets))} if os.path.exists(path)])"
print(Sandbox(seconds=60.0).run(program).stdout.strip())
print(Sandbox(seconds=60.0).run("import filelock").stderr.split()[-1])
print(Sandbox(seconds=60.0, packages=("filelock",)).run("import filelock; import numpy").stderr.split()[-1])
"""


def test_a_program_sees_interpreter_and_packages_but_not_the_folder_of_the_virtual_environment(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    packages = f"{PATH}:{Path(pytest.__file__).parents[1]}"
    command, environment = [tmp_path / "bin" / "python", "-c", PROJECT], {**os.environ, "PYTHONPATH": packages}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.stdout.splitlines() == ["[]", "'filelock'", "'numpy'"], ran


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(ValueError, match='expected installed packages, got "no-such-package"'):
        Sandbox(packages=("numpy", "no-such-package"))


def test_its_own_folder_is_empty_limited_and_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # another worker's sandboxes come and go in the common one
    box = Sandbox(disk=2**20)
    assert box.run("open('a', 'w').write('x' * 1000); import os; print(sorted(os.listdir()))").stdout == (
        "['a', 'main.py']\n"
    )
    fill = "import os\nfor n in range(8):\n    open(f'{n}', 'wb').write(bytes(2**18))"
    assert "No space left" in box.run(fill).stderr and OPEN.run(fill).ok
    assert not list(tmp_path.glob("sandbox-*"))


def test_there_is_no_network_not_even_to_this_machine(server: tuple[int, list[Any]]) -> None:
    port, seen = server
    connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5).close()"
    assert OPEN.run(connect).ok
    end = time.monotonic() + 5
    while not seen and time.monotonic() < end:
        time.sleep(0.01)
    assert len(seen) == 1
    assert "Connection refused" in Sandbox().run(connect).stderr and len(seen) == 1
    name = "import socket; s = socket.socket(socket.AF_UNIX); s.bind(chr(0) + 'sandbox-test'); s.listen(); {}"
    other = "import socket; socket.socket(socket.AF_UNIX).connect(chr(0) + 'sandbox-test')"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("\0sandbox-test")
        listening.listen()
        assert OPEN.run(other).ok and not Sandbox().run(other).ok
    assert Sandbox().run(name.format("print(1)")).ok


@pytest.mark.parametrize("tight", [{"memory": 512}, {"memory": 2**20}, {"seconds": 0.01}], ids=str)
def test_limits_under_which_nothing_runs_are_named(tight: Any) -> None:
    ((name, limit),) = tight.items()
    with pytest.raises(ValueError, match=rf"under which Python prints a digit, got .*[ (]{name}={limit},"):
        Sandbox(**tight).check()


@pytest.mark.nightly
def test_a_fork_bomb_is_stopped_at_the_limit(tmp_path: Path) -> None:
    mark = f"bomb-{os.getpid()}-{time.monotonic_ns()}"
    small = (
        "import subprocess, sys\n"
        f"sleep = 'import time; time.sleep(30)'\n"
        f"many = [subprocess.Popen([sys.executable, '-c', sleep, {mark!r}]) for _ in range(18)]\n"
        "print(len(many))\nfor one in many: one.kill(); one.wait()"
    )
    assert OPEN.run(small).stdout == "18\n"
    found = Sandbox(processes=8, seconds=20.0).run(small)
    assert "Resource temporarily unavailable" in found.stderr and not found.stdout
    bomb = (
        f"import os, sys\nif len(sys.argv) == 1: os.execv(sys.executable, [sys.executable, sys.argv[0], {mark!r}])\n"
        "while True:\n    try: os.fork()\n    except OSError: pass"
    )
    most = [0]

    def count() -> None:
        while not stop.wait(0.05):
            most[0] = max(most[0], len(pids_with(mark)))

    stop, begin = threading.Event(), time.monotonic()
    counter = threading.Thread(target=count)
    counter.start()
    result = Sandbox(seconds=3.0, processes=8).run(bomb)
    stop.set()
    counter.join()
    assert result.ending == "too long" and time.monotonic() - begin < 20
    assert 2 <= most[0] <= 8 and gone(mark), "it did fork, up to the limit, and nothing is left"
    assert Sandbox(seconds=20.0).run("print(1)").ok, "and the next one works"


def test_a_memory_bomb_gets_what_the_limit_says() -> None:
    small = "x = bytearray(200 * 2**20); print(len(x))"
    box = Sandbox(memory=2**27)
    assert OPEN.run(small).stdout == "209715200\n" and "MemoryError" in box.run(small).stderr
    grow = "x = []\nwhile True: x.append(bytearray(2**24))"
    assert "MemoryError" in Sandbox(memory=2**28).run(grow).stderr
    assert not Sandbox(memory=2**28).run("import mmap; mmap.mmap(-1, 2**30)").ok


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut(stream: str) -> None:
    endless = f"import sys\nwhile True: sys.{stream}.write('x' * 1000)"
    result = Sandbox(output=5000, seconds=20.0).run(endless)
    assert result.ending == "too much output" and len(getattr(result, stream)) == 5000 and result.seconds < 15
    some = f"import sys; sys.{stream}.write('x' * 6000)"
    assert len(getattr(Sandbox(seconds=20.0).run(some), stream)) == 6000


@pytest.mark.parametrize(
    "loop",
    ["while True: pass", "import time; time.sleep(1000)", "import os\nos.close(1); os.close(2)\nwhile True: pass"],
)
def test_an_endless_loop_has_its_time(loop: str) -> None:
    begin = time.monotonic()
    result = Sandbox(seconds=1.0).run(loop)
    assert not result.ok and 0.9 < time.monotonic() - begin < 10
    assert result.ending == "too long" or result.code == 128 + 24  # SIGXCPU


DAEMON = """
import os, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for stream in (0, 1, 2):
            os.close(stream)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", {mark!r}])
    os._exit(0)
os.wait()
time.sleep(0.5)
print("left")
"""


def test_a_daemon_left_behind_dies_with_the_program() -> None:
    mark = f"daemon-{os.getpid()}-{time.monotonic_ns()}"
    assert OPEN.run(DAEMON.format(mark=mark)).stdout == "left\n"
    survivors = pids_with(mark)
    assert len(survivors) == 1, "without the sandbox it lives on"
    os.kill(survivors[0], 9)
    assert gone(mark)
    assert Sandbox(seconds=20.0).run(DAEMON.format(mark=mark)).stdout == "left\n" and gone(mark)


@pytest.mark.nightly
def test_a_program_dies_with_a_trainer_that_is_killed() -> None:
    mark = f"orphan-{os.getpid()}-{time.monotonic_ns()}"
    sleep = f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', {mark!r}])"
    run = f"from lightning_rl.rewards import Sandbox; Sandbox(seconds=60.0).run({sleep!r})"
    trainer = subprocess.Popen([sys.executable, "-c", run])
    assert wait_for(lambda: len(pids_with(mark)) == 2), "the trainer and the program"
    trainer.kill()
    trainer.wait()
    assert gone(mark)


@pytest.mark.parametrize(
    "call",
    [
        "unshare(0x10000000)",
        "unshare(0x20000)",
        "mount(b'none', b'/sandbox', b'tmpfs', 0, None)",
        "mount(None, b'/usr', None, 32 | 4096, None)",
        "umount2(b'/usr', 2)",
        "chroot(b'/usr')",
        "setns(os.open('/proc/self/ns/user', os.O_RDONLY), 0)",
    ],
)
def test_calls_that_lead_out_are_denied(call: str) -> None:
    program = f"import ctypes, os\nprint(ctypes.CDLL(None).{call})"
    assert Sandbox().run(program).stdout == "-1\n"


def test_no_folder_but_the_own_one_can_be_written() -> None:
    program = (
        "import os\n"
        "def writes(folder):\n"
        "    try: return bool(open(folder + '/x', 'w'))\n"
        "    except OSError: return False\n"
        "mounts = [line.split()[1] for line in open('/proc/self/mounts')]\n"
        "print(sorted(m for m in [*mounts, '/dev/shm', '/proc/sys/kernel'] if os.path.isdir(m) and writes(m)))"
    )
    assert Sandbox().run(program).stdout == "['/sandbox']\n"


def test_many_at_once_do_not_get_in_each_others_way() -> None:
    results: list[SandboxResult] = []
    box = Sandbox(processes=3, seconds=30.0)
    program = (
        "import threading\nt = [threading.Thread(target=print, args=(1,)) for _ in range(2)]\n[x.start() for x in t]"
    )
    threads = [threading.Thread(target=lambda: results.append(box.run(program))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.stdout for result in results] == ["1\n1\n"] * 6


PROCESS_1 = """
import os
from lightning_rl.processes.worker import adopt_orphans, children
from lightning_rl.rewards import Sandbox

adopt_orphans()
for seconds, program in ((20.0, "print(1)"), (20.0, "exit(3)"), (0.5, "while True: pass")):
    print(Sandbox(seconds=seconds).run(program).code, children())
"""


def test_no_process_is_left_unreaped_where_the_trainer_adopts_orphans() -> None:
    ran = subprocess.run([sys.executable, "-c", PROCESS_1], capture_output=True, text=True, timeout=100, check=True)
    assert ran.stdout == "0 []\n3 []\n137 []\n", ran.stderr


def test_python_is_found_if_the_trainer_was_started_by_a_relative_path(tmp_path: Path) -> None:
    command = [os.path.relpath(sys.executable, tmp_path), "-c", PROCESS_1]
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": PATH}, capture_output=True, text=True, timeout=100,
        check=True,
    )  # fmt: skip
    assert ran.stdout == "0 []\n3 []\n137 []\n", ran.stderr


def test_without_bubblewrap_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "PATH", "/nowhere")
    with pytest.raises(
        SandboxUnavailable, match=r'got no "bwrap", "setpriv", "prlimit", "ldd": .*`apt install bubblewrap`'
    ):
        Sandbox().run("print(1)")


def test_a_failed_set_up_is_no_result_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bwrap"
    tool.write_text("#!/bin/sh\necho 'bwrap: Creating new namespace failed' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sandbox, "PATH", f"{tmp_path}:{sandbox.PATH}")
    with pytest.raises(SandboxUnavailable, match="got bwrap: Creating new namespace failed: install bubblewrap"):
        Sandbox().run("print(1)")
