"""What conftest.py groups runs on one worker of pytest-xdist: a newer pytest would ignore it, and say nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

GROUP = """
import pytest

@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("number", range(8))
def test_nothing(number: int) -> None: ...
"""


def test_a_group_of_tests_runs_on_one_worker(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "test_group.py").write_text(GROUP)
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "--dist", "loadgroup", "test_group.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    workers = re.findall(r"^\[(gw\d+)\].* PASSED", done.stdout, re.MULTILINE)
    assert len(workers) == 8 and len(set(workers)) == 1
