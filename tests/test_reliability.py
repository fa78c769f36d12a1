"""The table of faults is true: every row of docs/reliability.md names tests, and they are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
ROW = re.compile(r"^\| (?!fault|-)(.+) \|$", re.MULTILINE)


def test_every_row_has_its_test() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    functions = {name for text in sources.values() for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    faults, _, _ = PAGE.read_text(encoding="utf-8").partition("## Long runs")  # whose table holds figures
    rows = ROW.findall(faults)
    assert len(rows) > 60
    for row in rows:
        cells = row.split(" | ")
        assert len(cells) == 4 and all(cells), row
        files = [(PAGE.parent / link).resolve() for link in re.findall(r"\]\(([^)]+)\)", cells[3])]
        names = re.findall(r"`(test_\w+)(?:\[[^`]*\])?`", cells[3])
        assert files or names, row
        assert all(path in sources for path in files) and set(names) <= functions, row
