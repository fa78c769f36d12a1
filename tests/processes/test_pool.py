"""A pool of processes: calls that hang, die and leave children have their results, and nothing is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from kit.marks import gone, pids_with

from lightning_rl.processes.errors import DEATH, TIMEOUT, CallError
from lightning_rl.processes.pool import Pool

CALLS = 1_000
KINDS = {
    1: "hangs",
    **dict.fromkeys(range(4, 50, 10), "dies"),
    **dict.fromkeys(range(7, 50, 10), "leaks"),
}  # of 50 calls


def behave(number: int, kind: str) -> int:
    if kind == "hangs":
        time.sleep(1_000)
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "leaks":
        subprocess.Popen(["setsid", "sleep", "1000"], start_new_session=True)
    return number


def result_of(future: Any) -> Any:
    try:
        return future.result()
    except CallError as error:
        return error.kind


@pytest.mark.nightly
def test_of_a_thousand_calls_none_is_lost_and_nothing_is_left(tmp_path: Path) -> None:
    cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["behave"]))
    pool = Pool(cloudpickle.dumps(behave), processes=16, environment={"MARK": str(tmp_path)})
    kinds = [KINDS.get(number % 50, "") for number in range(CALLS)]
    futures = [pool.submit(cloudpickle.dumps((pair, {})), 10.0) for pair in enumerate(kinds)]
    expected = [{"hangs": TIMEOUT, "dies": DEATH}.get(kind, number) for number, kind in enumerate(kinds)]
    assert [result_of(future) for future in futures] == expected
    assert len(pool.pids()) <= 1 + 2 * 16 and pids_with(str(tmp_path))
    pool.close()
    assert gone(str(tmp_path)) and not pool.pids()
    assert pool.submit(cloudpickle.dumps(((5, ""), {})), 60.0).result() == 5, "and it starts again"
    pool.close()


GUARDED = """
import os, select, socket
from lightning_rl.processes import worker

trainer, life = socket.socketpair()
reading, writing = os.pipe()
wait = select.select

def wait_late(*sockets):
    os.write(writing, b"x")
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    return wait(*sockets)

if os.fork() == 0:
    trainer.close()
    select.select = wait_late
    worker.fork_with_guard(life)
    os.read(reading, 1)
    os._exit(3)
life.close()
print(bool(wait([trainer], [], [], 30)[0]) and trainer.recv(1))
"""


def test_a_guard_notices_a_process_that_ends_just_before_it_waits() -> None:
    ran = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, timeout=100, check=True)
    assert ran.stdout == "b'\\x03'\n", ran.stderr
