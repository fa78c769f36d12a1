"""docs/algorithms.md is what the registries say: every export has its row, formula, paper and figure."""

import importlib
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


def docs_of(kind: type) -> str:
    """The docstring of the file of a correction."""
    return importlib.import_module(kind.__module__).__doc__ or ""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("algorithms_page", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_registries_say(script: ModuleType) -> None:
    assert SCRIPT.with_suffix(".md").read_text() == script.page(), "run python docs/algorithms.py"


def test_every_name_and_every_correction_is_on_the_page() -> None:
    text = SCRIPT.with_suffix(".md").read_text()
    for name in (*LOSSES, *ESTIMATORS, *REDUCTIONS, *KL_ESTIMATORS):
        assert f"| `{name}` |" in text, name
    for name in callbacks.__all__:
        assert f"| [`{name}`](" in text, name


def test_every_algorithm_has_a_row_with_definition_and_figure_and_a_formula_where_the_row_links_to(
    script: ModuleType,
) -> None:
    rows = [line for line in SCRIPT.with_suffix(".md").read_text().splitlines() if line.startswith("| [`")]
    names = [one.value.__name__ for one in script.algorithms()]
    assert [re.findall(r"`(\w+)`", row)[0] for row in rows] == names
    for name, row in zip(names, rows, strict=True):
        link, _, _, definition, _, _, figure = (cell.strip() for cell in re.split(r"(?<!\\) \| ", row.strip("| ")))
        assert definition, f"{name}: begin its docstring with a sentence"
        assert figure == f"[figure](figures/{name}.svg)", name
        (file,) = re.findall(r"\]\(\.\./(.*)#\w+\)", link)
        assert ".. math::" in (ROOT / file).read_text(), f"{name}: add a .. math:: block to the docstring"


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
    said = {
        name for name in callbacks.__all__ if re.search(r"^Helps ", docs_of(getattr(callbacks, name)), re.MULTILINE)
    }
    classes = {type(one).__name__ for one in LOSSES.values()} | {*callbacks.__all__} - said | {"Normalized"}
    classes |= {one.__name__ for one in TraceDecay.__subclasses__()}
    missing = [name for name in sorted(classes) if not re.search(rf"`[^`]*\b{name}\(", text)]
    assert missing + [name for name in ESTIMATORS if f'`"{name}"`' not in text] == []


def test_what_it_is_compared_with_is_recorded(script: ModuleType) -> None:
    known = script.recorded_peers()
    used = {name for one in script.algorithms() for name in script.RECORDED.get(one.value.__name__, ())}
    assert used <= known.keys()
    manifest = json.loads((ROOT / "tests/data/goldens_more/kl_estimators/manifest.json").read_text())
    assert known["kl_binary"] == {case["peer"] for case in manifest["cases"]}


def test_every_link_to_code_leads_somewhere_and_every_algorithm_names_its_source() -> None:
    rows = [line for line in SCRIPT.with_suffix(".md").read_text().splitlines() if line.startswith("| [`")]
    assert len(rows) >= 60
    for row in rows:
        *_, source, _ = (cell.strip() for cell in row.strip("| ").split(" | "))
        assert source and source != "no paper", row
        (link,) = re.findall(r"\]\(\.\./([^)#]*)#", row.split(" | ")[0])
        assert (ROOT / link).is_file(), link
