"""The recipe of several turns learns on two seeds, also ahead and on two ranks; trained environment tokens show."""

import csv
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import agent
import pytest
from kit.conversations import leak_mask
from lightning import pytorch
from lightning.pytorch import Callback, Trainer

from lightning_rl.audit import SignalAudit
from lightning_rl.rollouts import collector

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "agent.py"


def logprobs_of_the_environment(folder: Path) -> list[float]:
    """``env/logprob`` of each rollout."""
    (file,) = folder.rglob("metrics.csv")
    with file.open() as lines:
        return [float(row["env/logprob"]) for row in csv.DictReader(lines) if row["env/logprob"]]


def check(folder: Path, output: str) -> None:
    figures = re.search(r"success before=(\d\.\d{3}) after=(\d\.\d{3})\n?$", output)
    assert figures, output[-500:]
    assert 0.20 <= float(figures[1]) <= 0.40 and float(figures[2]) >= 0.85
    first, *_, last = logprobs_of_the_environment(folder)
    assert abs(last - first) < 1.5


def run(folder: Path, *options: str) -> None:
    command = [sys.executable, RECIPE, *options]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    check(folder, ran.stdout)


@pytest.mark.nightly
@pytest.mark.parametrize("options", ["--seed 1", "--max_staleness 1"])
def test_held_out_greedy_success_rises(options: str, tmp_path: Path) -> None:
    run(tmp_path, *options.split())


@pytest.mark.nightly
def test_held_out_greedy_success_rises_on_two_ranks(tmp_path: Path) -> None:
    run(tmp_path, "--devices", "2", "--strategy", "fsdp2")


@pytest.mark.nightly
@pytest.mark.parametrize("leaks", [True, False])
def test_training_what_the_environment_says_shows_in_its_log_probability_and_to_the_audit(
    leaks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if leaks:
        lay_out = collector.lay_out
        monkeypatch.setattr(collector, "lay_out", lambda *rows, **options: leak_mask(lay_out(*rows, **options)))
    audit = SignalAudit(1, checks=["trained_tokens"])
    monkeypatch.setattr(pytorch, "Trainer", with_callback(pytorch.Trainer, audit))
    monkeypatch.chdir(tmp_path)
    for expected in ("the audit of rollout", "The number of training batches"):
        warnings.filterwarnings("ignore", expected)
    agent.main(seed=0)
    if leaks:
        first, *_, last = logprobs_of_the_environment(tmp_path)
        assert last - first > 2
    else:
        check(tmp_path, capsys.readouterr().out)
    assert {finding.check for finding in audit.findings} == ({"trained_tokens"} if leaks else set())


def with_callback(trainer: type[Trainer], callback: Callback) -> Callable[..., Trainer]:
    """A Trainer that has one callback more."""
    return lambda **options: trainer(**options | {"callbacks": [*options["callbacks"], callback]})
