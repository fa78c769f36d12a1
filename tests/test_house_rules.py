"""The rules of the house which no linter knows: sizes, sources, a test for every callback."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CALLBACKS = sorted((ROOT / "callbacks").glob("[!_]*.py"))
LIBRARY = sorted([*(ROOT / "lightning_rl").rglob("*.py"), *(ROOT / "callbacks").glob("*.py")])
RECIPES = sorted((ROOT / "recipes").glob("*.py"))


def lines_in(file: Path) -> int:
    return len(file.read_text().splitlines())


def nodes(files: list[Path]) -> Iterator[tuple[str, ast.AST]]:
    """Yields every syntax node with the place it stands at."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            yield f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", node


def docstring(file: Path) -> str:
    return ast.get_docstring(ast.parse(file.read_text())) or ""


def test_no_file_is_longer_than_400_lines() -> None:
    assert [file for file in LIBRARY + RECIPES if lines_in(file) > 400] == []


def test_no_recipe_is_longer_than_60_lines() -> None:
    assert [file for file in RECIPES if file.name != "sorting_task.py" and lines_in(file) > 60] == []


def test_no_function_is_longer_than_60_lines() -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [(place, node) for place, node in nodes(LIBRARY + RECIPES) if isinstance(node, functions)]
    assert [place for place, node in found if (node.end_lineno or 0) - node.lineno >= 60] == []


def test_every_module_says_what_it_holds() -> None:
    assert [file for file in LIBRARY + RECIPES if not docstring(file)] == []


def test_every_callback_names_its_source() -> None:
    assert [file for file in CALLBACKS if "Source:" not in docstring(file)] == []


def test_every_callback_has_its_own_test_file() -> None:
    assert [file for file in CALLBACKS if not (ROOT / "tests" / "callbacks" / f"test_{file.name}").is_file()] == []


def test_the_library_prints_nothing() -> None:
    calls = [(place, node.func) for place, node in nodes(LIBRARY) if isinstance(node, ast.Call)]
    assert [place for place, function in calls if isinstance(function, ast.Name) and function.id == "print"] == []
