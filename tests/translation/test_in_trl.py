"""TRL itself says what the normal suite takes from a record. ``make bench-trl`` runs this with TRL installed."""

import json
import os
from pathlib import Path

import pytest
from kit.translated import CASES, FIELDS, prepare, run_in_trl, steps_of, translate

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("TRL_PYTHON", ROOT / ".venv-trl/bin/python"))

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment with TRL: make bench-trl"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
]


def test_its_options_are_those_of_the_record() -> None:
    assert run_in_trl(PYTHON, "fields") == json.loads(FIELDS.read_text())


@pytest.mark.parametrize("case", CASES)
def test_a_recipe_learns_what_trl_learns(case: str, tmp_path: Path) -> None:
    script = prepare(tmp_path, case)
    ours, theirs = steps_of(translate(script, case)), run_in_trl(PYTHON, "steps", str(tmp_path))
    assert len(ours) == len(theirs) == 2
    for mine, its in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(its, rel=0, abs=1e-5)
