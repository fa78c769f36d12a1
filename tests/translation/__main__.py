"""Records what TRL takes and what it learns, for those who test without it.

python -m tests.translation .venv-trl/bin/python
"""

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from kit.translated import CASES, FIELDS, FIRST_STEPS, prepare, run_in_trl  # noqa: E402  needs the path


def main(python: Path) -> None:
    """Writes ``tests/data/trl``."""
    FIELDS.parent.mkdir(exist_ok=True)
    FIELDS.write_text(json.dumps(run_in_trl(python, "fields"), indent=1) + "\n")
    steps = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder), case)
            steps[case] = run_in_trl(python, "steps", folder)
    FIRST_STEPS.write_text(json.dumps(steps, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
