"""The quickstart learns with vLLM as it does with the embedded engine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.py"


@pytest.mark.nightly
def test_held_out_greedy_accuracy_rises(tmp_path: Path) -> None:
    command = [sys.executable, RECIPE, "--engine", "vllm"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    found = re.search(r"accuracy before=(\d\.\d{3}) after=(\d\.\d{3})\n?$", ran.stdout)
    assert found, ran.stdout[-500:]
    assert float(found[1]) <= 0.40 and float(found[2]) >= 0.75
