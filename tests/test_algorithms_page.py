"""docs/algorithms*.md are what the registries say: every export has its row, section, formula, paper and figure."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from lightning_rl import callbacks
from lightning_rl.advantages import ESTIMATORS, TraceDecay
from lightning_rl.losses import LOSSES
from lightning_rl.signal.kl import KL_ESTIMATORS
from lightning_rl.signal.reductions import REDUCTIONS

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "docs" / "algorithms.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("algorithms_page", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    """Every section of the pages of the families, by its heading."""
    pages = [page.read_text() for page in sorted(SCRIPT.parent.glob("algorithms_*.md"))]
    return {part.partition("\n")[0]: part for page in pages for part in page.split("\n## ")[1:]}


def test_every_algorithm_has_an_entry_of_what_it_is_compared_with(script: ModuleType) -> None:
    missing = [one.value.__name__ for one in script.algorithms() if one.value.__name__ not in script.RECORDED]
    assert missing == [], "add an entry to RECORDED in docs/algorithms.py"


def test_the_pages_are_what_the_registries_say(script: ModuleType) -> None:
    there = {page.name: page.read_text() for page in SCRIPT.parent.glob("algorithms*.md")}
    assert there == script.pages(), "run python docs/algorithms.py"


def test_every_name_and_every_correction_is_on_the_page() -> None:
    text = SCRIPT.with_suffix(".md").read_text()
    for name in (*LOSSES, *ESTIMATORS, *REDUCTIONS, *KL_ESTIMATORS):
        assert f"| `{name}` |" in text, name
    for name in callbacks.__all__:
        assert f"| [`{name}`](" in text, name


def test_every_algorithm_has_its_section_with_formula_paper_use_and_figure(
    script: ModuleType, sections: dict[str, str]
) -> None:
    names = [one.value.__name__ for one in script.algorithms()]
    assert sorted(sections) == sorted(names)
    for name, text in sections.items():
        (formula,) = re.findall(r"^\$\$\n(.+?)\n\$\$$", text, re.MULTILINE | re.DOTALL)[:1] or [""]
        assert formula, f"{name}: add a .. math:: block to the docstring"
        assert re.search(r"^\*Paper:\* \S", text, re.MULTILINE), name
        assert re.search(r"^\*Use:\* `\S", text, re.MULTILINE), name
        assert f"](figures/{name}.svg)" in text, name


def test_every_figure_is_small_whole_and_of_an_algorithm(script: ModuleType) -> None:
    figures = {path.stem: path.read_text() for path in (SCRIPT.parent / "figures").iterdir()}
    missing = {one.value.__name__ for one in script.algorithms()} ^ figures.keys()
    assert not missing, "run python docs/figures.py with these names"
    for name, text in figures.items():
        assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg", name
        assert not re.search(r"<script|href=\"(?!#)", text), name
    assert sum(map(len, figures.values())) < 2_000_000


def test_when_each_helps_is_said() -> None:
    text = (ROOT / "docs/choosing.md").read_text()
    classes = {type(one).__name__ for one in LOSSES.values()} | {*callbacks.__all__} | {"Normalized"}
    classes |= {one.__name__ for one in TraceDecay.__subclasses__()}
    missing = [name for name in sorted(classes) if not re.search(rf"`[^`]*\b{name}\(", text)]
    assert missing + [name for name in ESTIMATORS if f'`"{name}"`' not in text] == []


def test_what_it_is_compared_with_is_recorded(script: ModuleType) -> None:
    known = script.recorded_peers()
    used = {name for one in script.algorithms() for name in script.RECORDED[one.value.__name__]}
    assert used <= known.keys()
    manifest = json.loads((ROOT / "tests/data/goldens_more/kl_estimators/manifest.json").read_text())
    assert known["kl_binary"] == {case["peer"] for case in manifest["cases"]}


def test_every_link_to_code_leads_somewhere_and_every_algorithm_names_its_source() -> None:
    rows = [line for line in SCRIPT.with_suffix(".md").read_text().splitlines() if line.startswith("| `")]
    for row in rows:
        *_, source, code = (cell.strip() for cell in row.strip("|").split(" | "))
        assert source and source != "no paper", row
        (link,) = re.findall(r"\]\(\.\./([^)]*)\)", code)
        assert (ROOT / link).is_file(), link
