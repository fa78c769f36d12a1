"""The table of sizes in docs/scale.md is what ``docs/sizes.py`` computes, by the command that stands below it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def sizes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sizes", DOCS / "sizes.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["sizes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_first_row_and_its_command_are_those_of_the_page(sizes: ModuleType) -> None:
    page = (DOCS / "scale.md").read_text(encoding="utf-8")
    assert sizes.row(*sizes.ROWS[0]) in page
    assert f"lightning-rl {' '.join(sizes.words_of(*sizes.ROWS[0]))}\n" in page


@pytest.mark.long
def test_the_whole_table_is_that_of_the_page(sizes: ModuleType) -> None:
    assert sizes.table() in (DOCS / "scale.md").read_text(encoding="utf-8")
