"""Examples in docstrings."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = {*(ROOT / "lightning_rl").rglob("*.py"), *(ROOT / "lightning_rl" / "callbacks").glob("*.py")}
MODULES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in FILES
    if ">>> " in file.read_text()
)


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_the_module_are_true(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted and not result.failed
