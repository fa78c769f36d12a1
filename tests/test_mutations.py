"""Every known silent bug, put back, turns the test that is named after it red."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from mutations import CURES, EXPORTS, MUTATIONS, ROOT, Mutation, Run, apply

NUMBERED = re.compile(r"def (test_([12]_\d\d)_\w+)")
TESTS = [
    found.groups() for file in (ROOT / "tests/quiet_bugs").glob("*.py") for found in NUMBERED.finditer(file.read_text())
]
ROWS = [*(f"1_{row:02}" for row in range(1, 26)), *(f"2_{row:02}" for row in range(1, 23))]


def mutate(*names: str) -> tuple[int, str]:
    """Exit code and last line of ``python -m tests.mutations``."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.mutations", *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return ran.returncode, (ran.stdout + ran.stderr).splitlines()[-1]


@pytest.mark.nightly
def test_a_bug_that_is_put_back_is_caught() -> None:
    assert mutate("1_18") == (0, "mutations injected=1 caught=1")


@pytest.mark.nightly
def test_every_bug_is_caught() -> None:
    every = len(MUTATIONS) + len(EXPORTS) + len(CURES)
    assert mutate() == (0, f"mutations injected={every} caught={every}")


def test_every_row_has_a_test_and_every_test_a_mutation() -> None:
    assert sorted({row for _, row in TESTS}) == ROWS
    assert {mutation.test for mutation in MUTATIONS} == {name for name, _ in TESTS}


def test_every_mutation_fits_the_code_and_changes_it(tmp_path: Path) -> None:
    for mutation in (*MUTATIONS, *EXPORTS, *CURES):
        file = tmp_path / mutation.file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text((ROOT / mutation.file).read_text())
        apply(mutation, tmp_path)
        compile(file.read_text(), mutation.file, "exec")


def test_each_other_mutation_is_noticed_by_a_test_that_exists() -> None:
    for mutation in (*EXPORTS, *CURES):
        assert f"def {mutation.test}(" in (ROOT / mutation.where).read_text(), mutation.test


def test_an_anchor_that_is_not_unique_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("a = 1\nb = 1\n")
    with pytest.raises(ValueError, match=r"expected ' = 1' once in file\.py, got 2 times"):
        apply(Mutation("test", "file.py", " = 1", " = 2"), tmp_path)


@pytest.mark.parametrize(
    ("code", "output", "caught"),
    [
        (1, "FAILED a.py::test[x y] - assert 1 == 2\n1 failed", True),
        (1, "FAILED a.py::test - AssertionError: no\nFAILED a.py::other - ImportError: no\n2 failed", False),
        (1, "FAILED a.py::test - TypeError: no\n1 failed", False),
        (0, "1 passed", False),
        (2, "ERROR a.py - SyntaxError: no", False),
        (5, "no tests ran", False),
    ],
)
def test_only_an_expectation_that_is_not_met_counts_as_caught(code: int, output: str, caught: bool) -> None:
    assert Run(code, output).failed_by_assertion is caught


def test_the_page_lists_every_row_and_exactly_the_tests_that_exist() -> None:
    page = (ROOT / "docs/evidence.md").read_text()
    listed = re.findall(r"^\| ([12]\.\d\d) \|(.*)\|$", page, re.MULTILINE)
    assert [row.replace(".", "_") for row, _ in listed] == ROWS
    named = {(name, row.replace(".", "_")) for row, cells in listed for name in re.findall(r"`(test_[12]_\w+)`", cells)}
    assert named == set(TESTS)
