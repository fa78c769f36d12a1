"""The recipe of several turns learns on every seed, also ahead, on two ranks, and shows when the wrong tokens train."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import agent
import pytest
from kit.conversations import leak_mask

from lightning_rl.rollouts.sample import Sampler

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "agent.py"


def logprobs_of_the_environment(folder: Path) -> list[float]:
    """``env/logprob`` of each rollout."""
    (file,) = folder.rglob("metrics.csv")
    return [float(row["env/logprob"]) for row in csv.DictReader(file.open()) if row["env/logprob"]]


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


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_held_out_greedy_success_rises(seed: int, tmp_path: Path) -> None:
    run(tmp_path, "--seed", str(seed))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("options", ["--max_staleness 1", "--devices 2 --strategy fsdp2"])
def test_it_rises_ahead_of_the_update_and_on_two_ranks_too(options: str, seed: int, tmp_path: Path) -> None:
    run(tmp_path, *options.split(), "--seed", str(seed))


@pytest.mark.long
def test_training_what_the_environment_says_shows_in_its_log_probability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out = Sampler._lay_out  # noqa: SLF001
    monkeypatch.setattr(Sampler, "_lay_out", lambda *arguments: leak_mask(lay_out(*arguments)))
    monkeypatch.chdir(tmp_path)
    agent.main(seed=0)
    first, *_, last = logprobs_of_the_environment(tmp_path)
    assert last - first > 2
