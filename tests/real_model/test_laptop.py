"""``recipes/laptop.py`` learns on every seed, resumes after a kill and after Ctrl-C, and runs on two ranks."""

import csv
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.real_model import FOLDER, NEEDED, ROOT

pytestmark = [pytest.mark.nightly, NEEDED]

RECIPE = ROOT / "recipes" / "laptop.py"
SAVED = 8  # steps between two checkpoints


def start(folder: Path, *options: str) -> "subprocess.Popen[str]":
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(RECIPE), "--policy", str(FOLDER), *options]
    with (folder / "output").open("a") as output:
        return subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, text=True)


def run(folder: Path, *options: str) -> str:
    """Return what the recipe prints."""
    assert start(folder, *options).wait() == 0, (folder / "output").read_text()[-3000:]
    return (folder / "output").read_text()


def rollouts(folder: Path) -> list[int]:
    """Return the rollouts of which the recipe printed a line; its logger writes to disk once per validation."""
    return [int(line) for line in re.findall(r"^ +(\d+) +\d", (folder / "output").read_text(), re.MULTILINE)]


def logged(folder: Path, column: str) -> list[float]:
    with (folder / "runs" / "addition" / "version_0" / "metrics.csv").open(newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row.get(column)]


@pytest.mark.parametrize("seed", range(3))
def test_held_out_greedy_accuracy_rises(seed: int, tmp_path: Path) -> None:
    last = run(tmp_path, "--seed", str(seed)).splitlines()[-1]
    found = re.fullmatch(r"accuracy before=(\d\.\d{3}) after=(\d\.\d{3})", last)
    assert found, last
    before, after = map(float, found.groups())
    assert after >= max(0.85, before + 0.30)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(folder, "--rollouts", str(2 * SAVED))
    return folder


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_an_ended_run_resumes_bitwise(ending: signal.Signals, whole: Path, tmp_path: Path) -> None:
    ended = start(tmp_path, "--rollouts", str(2 * SAVED))
    last = tmp_path / "runs" / "addition" / "version_0" / "checkpoints" / "last.ckpt"
    while len(rollouts(tmp_path)) < SAVED + 2:
        assert ended.poll() is None, (tmp_path / "output").read_text()[-3000:]
        time.sleep(0.2)
    ended.send_signal(ending)
    assert ended.wait(120) != 0
    interrupted = next(tmp_path.rglob("interrupted.ckpt"), None)
    assert (interrupted is None) == (ending == signal.SIGKILL)
    before = rollouts(tmp_path)
    assert before[-1] < 2 * SAVED - 1
    run(tmp_path, "--rollouts", str(2 * SAVED), "--ckpt_path", str(interrupted or last))
    made = rollouts(tmp_path)[len(before) :]
    assert made == list(range(SAVED if ending == signal.SIGKILL else made[0], 2 * SAVED))
    resumed = tmp_path / "runs" / "addition" / "version_1" / "checkpoints" / "last.ckpt"
    expected, got = (states(path) for path in (next(whole.rglob("last.ckpt")), resumed))
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


def states(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights and the states of the optimizer in a checkpoint."""
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    (optimizer,) = checkpoint["optimizer_states"]
    moments = {f"{n}.{key}": value for n, state in optimizer["state"].items() for key, value in state.items()}
    return {**checkpoint["state_dict"], **moments}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_train_as_one(strategy: str, whole: Path, tmp_path: Path) -> None:
    run(tmp_path, "--rollouts", "2", "--devices", "2", "--strategy", strategy)
    for column in ("reward/task", "length/mean", "optim/grad_norm"):
        assert logged(tmp_path, column)[0] == pytest.approx(logged(whole, column)[0], rel=1e-3), column
