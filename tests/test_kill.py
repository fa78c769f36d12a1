"""kill -9 at any moment of a run with checkpoints: what is started again ends as if nothing had happened."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import killed_run


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Starts the run; no test waits for it without a limit."""
    folder.mkdir(exist_ok=True)
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    command = [sys.executable, killed_run.__file__, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


def seconds_of_training(process: subprocess.Popen[bytes], folder: Path) -> float:
    """Waits for the beginning and the end of training."""
    wait_for_start(process, folder)
    begin = time.monotonic()
    assert process.wait(timeout=120) == 0
    return time.monotonic() - begin


def wait_for_start(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Waits until training begins."""
    end = time.monotonic() + 120
    while not (folder / "started").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)


def killed_and_finished(folder: Path, delay: float) -> Any:
    """Kills a run some time after training began, then runs it to its end."""
    process = start(folder)
    try:
        wait_for_start(process, folder)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
        again = start(folder)
        assert again.wait(timeout=120) == 0
    finally:
        process.kill()
    return torch.load(folder / "result")


def check(folder: Path, moments: int) -> None:
    """Kills at random moments, each in a folder of its own."""
    seconds = seconds_of_training(start(folder / "whole"), folder / "whole")
    expected, draw = torch.load(folder / "whole" / "result"), random.Random(0)
    assert expected["steps"] == 48
    for number in range(moments):
        found = killed_and_finished(folder / str(number), draw.random() * seconds)
        assert found["steps"] == expected["steps"] and found["states"] == expected["states"]
        for name, weight in expected["weights"].items():
            assert torch.equal(found["weights"][name], weight), name


@pytest.mark.slow
def test_a_run_killed_at_three_moments_ends_bitwise_equal(tmp_path: Path) -> None:
    check(tmp_path, 3)


@pytest.mark.long
def test_a_run_killed_at_twenty_moments_ends_bitwise_equal(tmp_path: Path) -> None:
    check(tmp_path, 20)
