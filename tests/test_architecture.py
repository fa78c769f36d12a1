"""The map is true: what docs/architecture.md and CONTRIBUTING.md mention exists, and the layers are the contract's."""

import ast
import re
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from lightning_rl.corrections import CONTRIBUTIONS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"]
CODE = re.compile(r"`([^`\n]+)`")
EXAMPLES = re.compile(r"^\* bad: .*(?:\n  .*)*", re.MULTILINE)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def contract() -> list[str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]


@cache
def definitions() -> set[str]:
    """Every name that the repository's code defines: classes, functions, arguments, attributes, constants, files."""
    names: set[str] = set()
    for folder in ("lightning_rl", "callbacks", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            names |= {file.stem, file.name, file.parent.name}
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    names.add(node.name)
                elif isinstance(node, ast.arg):
                    names.add(node.arg)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
                elif isinstance(node, ast.Attribute):
                    names.add(node.attr)
                elif isinstance(node, ast.keyword) and node.arg:
                    names.add(node.arg)
    return names


@each_page
def test_every_path_exists(page: Path) -> None:
    paths = [
        code for code in CODE.findall(page.read_text()) if re.fullmatch(r"[\w.]+(?:/[\w.]+)*/?", code) and "/" in code
    ]
    folders = (ROOT, ROOT / "lightning_rl")
    future = {"environments/"}  # the page says where it will stand
    assert [
        path for path in paths if path not in future and not any((folder / path).exists() for folder in folders)
    ] == []


@each_page
def test_every_name_exists(page: Path) -> None:
    known = definitions()
    text = EXAMPLES.sub("", page.read_text())
    codes = [code for code in CODE.findall(text) if re.fullmatch(r"[A-Za-z_][\w.]*(?:\([^`]*\))?", code)]
    words = {part for code in codes for part in code.partition("(")[0].split(".") if part}
    allowed = {
        "B",
        "V",
        "make",
        "hypothesis",
        "kwargs",
        "py",
        "max_",
        "min_",
        "Args",
        "Raises",
        "found",
        "given",
        "own",
    }
    assert sorted(word for word in words if word not in known | allowed) == []


@each_page
def test_every_make_target_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    mentioned = set(re.findall(r"\bmake ([a-z-]+)", page.read_text()))
    assert mentioned - targets == set()


def test_the_layers_are_those_of_the_contract() -> None:
    text = PAGES[0].read_text()
    drawn = [line.strip() for line in text.split("## Packages and layers")[1].split("```")[1].strip().splitlines()]
    assert [re.sub(r"\s+", " ", line) for line in drawn] == contract()


def test_every_package_is_described() -> None:
    text = PAGES[0].read_text().split("## Packages and layers")[1].split("## Contributions")[0]
    packages = {name for layer in contract() for name in layer.split(" : ")}
    assert {name for name in packages if not re.search(rf"/{name}(?:\.py)?\)", text)} == set()


def test_the_table_of_contributions_is_the_codes() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]+) \| ([^|]*) \| ([^|]*) \|", PAGES[0].read_text(), re.MULTILINE)
    entries = [(name, e.when, e.returns, e.combined_by, e.affects) for name, e in CONTRIBUTIONS.items()]
    assert [tuple(cell.strip() for cell in row) for row in rows] == entries


def test_a_new_part_goes_where_the_table_says() -> None:
    section = PAGES[0].read_text().split("## Where a new part goes")[1].split("## Add a feature")[0]
    rows = [
        line.split(" | ") for line in section.splitlines() if line.startswith("| ") and not line.startswith("| new")
    ]
    assert [row[0].removeprefix("| ") for row in rows] == [
        "loss",
        "correction",
        "engine",
        "reward",
        "field of a rollout",
        "value of each token from an engine",
    ]
    for cell in (cell for row in rows for cell in row[1:]):
        links = [(ROOT / "docs" / path).resolve() for path in re.findall(r"\]\(([^)#]+)", cell)]
        assert all(link.exists() for link in links), cell
        for name, link in zip(re.findall(r"^`(\w+)` in ", cell), links, strict=False):
            assert re.search(rf"^(?:class )?{name}\b", link.read_text(), re.MULTILINE), cell


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = grimp.build_graph("lightning_rl", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # raises a CycleError that names the circle
