"""The quickstart learns, from its own command line, on every seed and with every algorithm that it offers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.py"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "accuracy"),
    [
        *((f"--seed {seed}", 0.75) for seed in range(5)),
        ("--algorithm ppo", 0.75),
        ("--updates 4", 0.75),
        ("--max_staleness 1", 0.75),
        ("--max_staleness 1 --algorithm ppo", 0.75),
    ],
)
def test_held_out_greedy_accuracy_rises(options: str, accuracy: float, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, RECIPE, *options.split()], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    last = ran.stdout.splitlines()[-1]
    found = re.fullmatch(r"accuracy before=(\d\.\d{3}) after=(\d\.\d{3})", last)
    assert found, last
    before, after = map(float, found.groups())
    assert 0.20 <= before <= 0.40
    assert after >= accuracy
    (folder,) = (tmp_path / "runs" / "sorting").iterdir()
    assert (folder / "learning_curve.png").stat().st_size > 10_000
    assert "reward/task" in (folder / "metrics.csv").read_text().splitlines()[0]
