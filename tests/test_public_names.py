"""Public names: imported lazily, found by tools, the same in every list."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lightning_rl

ROOT = Path(__file__).resolve().parents[1]


def checked_imports() -> dict[str, str]:
    """The names that type checkers see, with the module that each comes from."""
    tree = ast.parse((ROOT / "lightning_rl" / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_the_lists_of_names_agree() -> None:
    assert checked_imports() == lightning_rl.MODULE_OF
    assert sorted({*lightning_rl.MODULE_OF, "__version__"}) == sorted(lightning_rl.__all__)


def test_every_name_is_there_and_listed() -> None:
    assert [name for name in lightning_rl.__all__ if not hasattr(lightning_rl, name)] == []
    assert set(lightning_rl.__all__) - set(dir(lightning_rl)) == set()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'lightning_rl' has no attribute 'GRPPO'"):
        _ = lightning_rl.GRPPO  # pyrefly: ignore[missing-attribute]
    with pytest.raises(ImportError, match="GRPPO"):
        exec("from lightning_rl import GRPPO")


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert lightning_rl.__version__ == project["version"]


def test_the_package_alone_imports_no_torch() -> None:
    code = "import sys, lightning_rl, lightning_rl.cli.parser; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed == "False\n"
