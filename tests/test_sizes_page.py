"""The table of sizes in docs/strategies.md is what ``docs/sizes.py`` computes, and what the doctor would say of it."""

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


def test_the_table_is_that_of_the_page(sizes: ModuleType) -> None:
    assert f"\n{sizes.table()}{sizes.END}" in (DOCS / "strategies.md").read_text(encoding="utf-8")
