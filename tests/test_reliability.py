"""The table of faults is true: every row of docs/reliability.md names a test, and the test is there."""

import ast
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reliability.md"
ROW = re.compile(r"^\| (?!fault|-)(.+) \|$", re.MULTILINE)
TEST = re.compile(r"\[test\]\(([^)]+)\) `(\w+)`")


def test_every_row_has_its_test() -> None:
    rows = ROW.findall(PAGE.read_text().partition("## Long runs")[0])
    assert len(rows) > 25
    for row in rows:
        cells = row.split(" | ")
        assert len(cells) == 4 and all(cells), row
        named = TEST.fullmatch(cells[3])
        assert named is not None, row
        tree = ast.parse((PAGE.parent / named[1]).read_text())
        assert named[2] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, row
