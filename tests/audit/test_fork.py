"""A copy of the process says what a task comes to, and changes nothing outside of itself."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.audit.fork import TOO_LATE, Fork, NoReplyError, ask_copy

STATE = {"calls": 0}


def count() -> int:
    STATE["calls"] += 1
    return STATE["calls"]


def test_a_copy_begins_where_the_process_stands_and_leaves_it_there() -> None:
    STATE["calls"] = 3
    assert [ask_copy(count, 5.0) for _ in range(2)] == [4, 4] and STATE["calls"] == 3


def test_copies_of_a_copy_begin_where_it_stands() -> None:
    STATE["calls"] = 3
    assert ask_copy(lambda: (count(), [ask_copy(count, 5.0) for _ in range(2)]), 5.0) == [4, [5, 5]]


def test_foreign_code_leaves_no_process_behind_in_a_copy() -> None:
    def fork() -> int:
        if not (child := os.fork()):
            time.sleep(60)
        return child

    for task in (fork, lambda: ask_copy(fork, 5.0), lambda: (ask_copy(count, 5.0), fork())):
        with pytest.raises(NoReplyError, match=r"would reach out of its process .os\.fork"):
            ask_copy(task, 5.0)


def write(path: Path) -> int:
    with path.open("a") as file:
        return file.write("x")


def test_a_file_of_the_process_is_out_of_reach(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:

        def log() -> None:
            file.write("from a copy")
            file.flush()

        ask_copy(log, 5.0)
        file.write("from the run")
    assert (tmp_path / "log").read_text() == "from the run"


def test_what_foreign_code_writes_to_a_file_reaches_no_pipe_and_is_never_run(tmp_path: Path) -> None:
    """Text in the form of a pickle, written to any file that the process has, in a copy and in a copy of that."""
    payload = b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."

    def spray() -> int:
        for number in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(number, payload)
        return 1

    with (tmp_path / "log").open("w"):
        for task in (spray, lambda: ask_copy(spray, 5.0)):
            with contextlib.suppress(NoReplyError):
                assert ask_copy(task, 5.0) == 1
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "log").read_text() == ""


def test_a_copy_reaches_no_other_process_and_no_clock_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for task, event in [
        (lambda: os.kill(os.getppid(), signal.SIGUSR2), "os.kill"),
        (lambda: os.utime(tmp_path / "file", (1, 1)), "os.utime"),
    ]:
        with pytest.raises(NoReplyError, match=f"would reach out of its process .{event}"):
            ask_copy(task, 5.0)
    assert (tmp_path / "file").stat().st_mtime > 1


@pytest.mark.parametrize(
    ("name", "event"), [("write", "open"), ("connect", "socket"), ("start", "subprocess"), ("swallow", "open")]
)
def test_what_reaches_outside_gets_no_reply(name: str, event: str, tmp_path: Path) -> None:
    def swallow() -> int:
        try:
            return write(tmp_path / "file")
        except OSError:
            return 0

    tasks: dict[str, Any] = {
        "write": lambda: write(tmp_path / "file"),
        "connect": lambda: socket.create_connection(("127.0.0.1", 9)),
        "start": lambda: subprocess.run([sys.executable, "--version"], check=True),
        "swallow": swallow,
    }
    with pytest.raises(NoReplyError, match=rf"would reach out of its process \({event}"):
        ask_copy(tasks[name], 5.0)
    assert not (tmp_path / "file").exists()


def test_a_copy_that_hangs_dies_or_raises_says_why_and_is_gone() -> None:
    for task, reason in [
        (lambda: time.sleep(60), TOO_LATE),
        (lambda: os._exit(3), "a copy of it died"),
        (lambda: 1 / 0, "a copy of it raised ZeroDivisionError: division by zero"),
    ]:
        fork = Fork(task, 0.3)
        assert fork.reply().reason == reason
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)


def test_a_copy_nobody_waits_for_is_ended() -> None:
    fork = Fork(lambda: time.sleep(60), 60.0)
    fork.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
