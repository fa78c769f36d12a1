"""What conftest.py groups runs on one worker of pytest-xdist: a newer pytest would ignore it, and say nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_what_starts_processes_runs_on_one_worker() -> None:
    pytest.importorskip("xdist")
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "--dist", "loadgroup", "tests/test_launch.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    workers = re.findall(r"^\[(gw\d+)\].* PASSED .*@processes", done.stdout, re.MULTILINE)
    assert len(workers) >= 5 and len(set(workers)) == 1
