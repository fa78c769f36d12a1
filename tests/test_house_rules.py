"""House rules that no linter checks: names, sources, a test for every callback."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from kit.skips import command_of

ROOT = Path(__file__).resolve().parents[1]
CALLBACKS = sorted((ROOT / "callbacks").glob("[!_]*.py"))
LIBRARY = sorted([*(ROOT / "lightning_rl").rglob("*.py"), *(ROOT / "callbacks").glob("*.py")])
RECIPES = sorted((ROOT / "recipes").glob("*.py"))

PARTICIPLE = re.compile(
    r"\w{2,}ed|begun|born|bound|broken|brought|built|chosen|done|drawn|driven|found|given|gone|held|hidden|kept|known|"
    r"laid|led|left|lent|lost|made|meant|met|paid|put|said|seen|sent|shown|sold|spoken|stood|taken|thought|told|torn|"
    r"understood|won|written"
)
POSSESSIVE_GROUP = re.compile(r"\)[*+?]\+|\(\?>")
NO_PARTICIPLES = {"need", "seed", "speed", "feed", "embed", "shed"}
NO_PARTICIPLES |= {"pretrained", "generated"}  # Hugging Face's noun, and what is observed
PREPOSITIONS = {"after", "and", "at", "back", "before", "by", "for", "from", "in", "of", "on", "to", "up", "with"}
STATES = {"begun", "failed", "finished", "sharded", "truncated"}  # of properties, as in `parallel.sharded`


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def nodes(files: list[Path]) -> Iterator[tuple[str, ast.AST]]:
    """Yield every syntax node with its file and line."""
    for file in files:
        path = file.relative_to(ROOT)
        for node in ast.walk(tree(file)):
            yield f"{path}:{getattr(node, 'lineno', 0)}", node


def docstring(file: Path) -> str:
    return ast.get_docstring(tree(file)) or ""


def is_participle(word: str) -> bool:
    return PARTICIPLE.fullmatch(word) is not None and word not in NO_PARTICIPLES


def named_by_participle(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True if the head of its name is a participle: the last word, or the one before a preposition.

    A participle before a noun is an adjective: `clipped_surrogate` is a surrogate.
    """
    words = [word for word in function.name.split("_") if word]
    decorators = {getattr(node, "id", getattr(node, "attr", "")) for node in function.decorator_list}
    if decorators & {"property", "cached_property"} and function.name in STATES:
        return False
    heads = [word for word, following in zip(words, [*words[1:], "of"], strict=True) if following in PREPOSITIONS]
    return any(is_participle(word) for word in heads)


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("def looked(): ...", True), ("def _state_drawn(): ...", True), ("def answers_given(): ...", True),
        ("def charged_at_draw(): ...", True), ("def clipped_surrogate(): ...", False),
        ("def sample(): ...", False), ("def seed(): ...", False), ("@property\ndef sharded(self): ...", False),
        ("def sharded(self): ...", True), ("def __init__(self): ...", False), ("def take(self): ...", False),
    ],
)  # fmt: skip
def test_a_participle_is_known_as_one(code: str, named: bool) -> None:
    function = ast.parse(code).body[0]
    assert isinstance(function, ast.FunctionDef) and named_by_participle(function) is named


def test_no_function_is_named_by_a_participle() -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    defined = [(place, node) for place, node in nodes(LIBRARY) if isinstance(node, functions)]
    assert [f"{place} {node.name}" for place, node in defined if named_by_participle(node)] == []


def test_the_library_mocks_nothing() -> None:
    imports = [
        (place, node) for place, node in nodes(LIBRARY + RECIPES) if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert [place for place, node in imports if "mock" in ast.unparse(node)] == []


def test_no_pattern_has_a_possessive_group() -> None:
    """Python before 3.11.5 matches them wrongly (gh-106052); possessive characters and sets are right."""
    texts = [(place, node.value) for place, node in nodes(LIBRARY) if isinstance(node, ast.Constant)]
    assert [place for place, text in texts if POSSESSIVE_GROUP.search(str(text))] == []


def test_the_formatter_lays_out_everything() -> None:
    assert [file for file in LIBRARY if "# fmt: skip" in file.read_text()] == []


def test_every_module_says_what_it_holds() -> None:
    assert [file for file in LIBRARY + RECIPES if not docstring(file)] == []


def test_every_callback_names_its_source() -> None:
    assert [file for file in CALLBACKS if "Source:" not in docstring(file)] == []


def test_every_callback_has_its_own_test_file() -> None:
    assert [file for file in CALLBACKS if not (ROOT / "tests" / "callbacks" / f"test_{file.name}").is_file()] == []


@pytest.mark.parametrize(
    ("reason", "command"),
    [
        ("could not import 'gem': No module named 'gem'", "make test-gem"),
        ("could not import 'openenv.core': No module named 'openenv'", "make test-openenv"),
        ("could not import 'tensorboard.plugin_util': No module named 'tensorboard'", "make test-loggers"),
        ("no Chromium on the path: apt-get install chromium", "apt-get install chromium"),
        ("a GPU notes no copies", "a GPU notes no copies"),
        ("could not import 'unlisted': No module", "could not import 'unlisted': No module"),
    ],
)
def test_a_skipped_test_has_a_command_that_runs_it(reason: str, command: str) -> None:
    assert command_of(reason) == command


def test_the_library_prints_nothing() -> None:
    calls = [(place, node.func) for place, node in nodes(LIBRARY) if isinstance(node, ast.Call)]
    assert [place for place, function in calls if isinstance(function, ast.Name) and function.id == "print"] == []


def test_the_spelling_of_folders_that_git_ignores_is_not_checked() -> None:
    skipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["codespell"]["skip"].split(",")
    folders = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.endswith("/")]
    visible = [folder for folder in folders if folder[0] not in "._*"]  # codespell skips hidden ones
    assert visible and all(f"./{folder}" in skipped for folder in visible)
