"""A pool of processes: calls that hang, die and leave children have their results, and nothing is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from kit.marks import gone, pids_with, wait_for

from lightning_rl.processes.errors import DEATH, INTERRUPT, LOADING, TIMEOUT, CallError
from lightning_rl.processes.pool import Pool
from lightning_rl.processes.ray_pool import pool_of
from lightning_rl.processes.timeouts import CLOCK

Place = Callable[[int], Any]
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
def test_of_a_thousand_calls_none_is_lost_and_nothing_is_left(tmp_path: Path, place: Place) -> None:
    cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["behave"]))
    pool = pool_of(cloudpickle.dumps(behave), place(16), environment={"MARK": str(tmp_path)})
    kinds = [KINDS.get(number % 50, "") for number in range(CALLS)]
    futures = [pool.submit(cloudpickle.dumps((pair, {})), 10.0) for pair in enumerate(kinds)]
    expected = [{"hangs": TIMEOUT, "dies": DEATH}.get(kind, number) for number, kind in enumerate(kinds)]
    assert [result_of(future) for future in futures] == expected
    assert len(pool.pids()) <= (2 + 2 * 16 if place is int else 4 * 16) and pids_with(str(tmp_path))
    pool.close()
    assert gone(str(tmp_path)) and not pool.pids()
    assert pool.submit(cloudpickle.dumps(((5, ""), {})), 60.0).result() == 5, "and it starts again"
    pool.close()


class Hangs:
    """Function that hangs while a process loads it."""

    def __reduce__(self) -> Any:  # noqa: D105
        return time.sleep, (1_000,)


def loading_pool(mark: Path, place: Place = int) -> tuple[Pool, Any]:
    """Return a pool whose server hangs while it loads the function, and a call."""
    pool = pool_of(cloudpickle.dumps(Hangs()), place(2), environment={"MARK": str(mark)})
    call = pool.submit(cloudpickle.dumps(((), {})), 1.0)
    assert wait_for(lambda: len(pool.pids()) == 2)
    return pool, call


def failure_of(call: Any) -> tuple[str, str]:
    with pytest.raises(CallError) as caught:
        call.result(60)
    return caught.value.kind, caught.value.message


def test_closing_ends_a_process_that_hangs_while_it_loads(tmp_path: Path, place: Place) -> None:
    pool, call = loading_pool(tmp_path, place)
    pool.close()
    assert failure_of(call) in {(LOADING, "the process was ended by SIGKILL"), (DEATH, "was ended by SIGKILL")}
    assert gone(str(tmp_path)) and not pool.pids()


def test_loading_has_a_time_limit_and_prints_where_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lightning_rl.processes.pool.STARTUP_SECONDS", 3.0)
    pool, call = loading_pool(tmp_path)
    assert failure_of(call) == (LOADING, "the process took longer than 3 s")
    assert "in serve" in capfd.readouterr().err and gone(str(tmp_path))
    assert failure_of(pool.submit(b"", 1.0)) == (LOADING, "the process took longer than 3 s"), "without a second wait"
    pool.close()


def test_a_signal_that_stops_the_run_interrupts_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    monkeypatch.setattr("lightning_rl.processes.pool.HURRY", 0.1)
    pool, call = loading_pool(tmp_path, place)
    monkeypatch.setattr(CLOCK, "stopped_by", signal.SIGTERM)
    assert failure_of(call) == (INTERRUPT, "was interrupted, because SIGTERM stopped the run")
    assert gone(str(tmp_path))
    pool.close()


def test_a_pool_whose_server_is_stopped_can_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_rl.processes.pool.KILL_SECONDS", 0.5)
    cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["behave"]))
    pool = Pool(cloudpickle.dumps(behave), processes=1, environment={"MARK": str(tmp_path)})
    assert pool.submit(cloudpickle.dumps(((5, ""), {})), 60.0).result() == 5
    for pid in pool.pids():
        os.kill(pid, signal.SIGSTOP)
    pool.close()
    assert gone(str(tmp_path))


TRAINER = """
import cloudpickle, sys, time
from lightning_rl.processes.pool import Pool
from lightning_rl.processes.ray_pool import pool_of
from lightning_rl.processes.timeouts import CLOCK

class Hangs:
    def __reduce__(self):
        return time.sleep, (1_000,)

Pool(cloudpickle.dumps(Hangs()), processes=1, environment={"MARK": sys.argv[1]}).submit(b"", 1.0).result()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_hangs_while_it_loads_ends_with_the_trainer(tmp_path: Path, number: int) -> None:
    mark = str(tmp_path)
    with subprocess.Popen([sys.executable, "-c", TRAINER, f"{mark}/"]) as trainer:
        assert wait_for(lambda: len(pids_with(mark)) == 3), "trainer, guard and server"
        trainer.send_signal(number)
        assert trainer.wait(10) == -number
    assert gone(mark)


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
