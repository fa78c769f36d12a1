"""The locks hold what pyproject.toml asks for, by hashes alone, and a lower bound that was not run is found."""

import re
import tomllib
from pathlib import Path

import bounds
import licences
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = [(ROOT / name).read_text(encoding="utf-8") for name in ("requirements.lock", "requirements-dev.lock")]
DEMO, TOOLS = [dict(re.findall(r"^([a-z0-9-]+)==([\w.]+)", lock, re.MULTILINE)) for lock in LOCKS]
PINS = DEMO | TOOLS
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_every_requirement_of_the_tools_is_locked_at_a_version_that_it_allows() -> None:
    extras = PROJECT["optional-dependencies"]
    (own,) = [Requirement(line) for line in extras["dev"] if line.startswith("lightning-rl[")]
    lines = [*PROJECT["dependencies"], *extras["dev"], *(line for extra in own.extras for line in extras[extra])]
    asked = [Requirement(line) for line in lines if not line.startswith(("lightning-rl", "torch>"))]
    assert len(asked) > 25
    assert [str(one) for one in asked if PINS.get(canonicalize_name(one.name), "") not in one.specifier] == []


def test_the_demo_installs_the_library_and_its_report_and_no_tool() -> None:
    lines = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["report"]]
    asked = {canonicalize_name(Requirement(line).name) for line in lines} - {"torch"}
    assert asked <= DEMO.keys() and not DEMO.keys() & TOOLS.keys()
    assert {"deepspeed", "datasets", "hypothesis", "pandas", "pyrefly", "pytest"} <= TOOLS.keys()


def test_every_file_has_a_hash_and_none_a_place() -> None:
    entries = [entry for lock in LOCKS for entry in re.split(r"\n(?=\S)", lock.strip())]
    assert len(entries) == len(PINS) > 80
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    assert not any("://" in lock or "index-url" in lock for lock in LOCKS) and "torch" not in PINS


def test_a_bound_below_what_was_installed_is_untrue() -> None:
    project = """
        [project]
        dependencies = ["one>=1", "two[extra]>=2.0, <3", "torch>=9"]
        [project.optional-dependencies]
        more = ["three==3.1", "one>=1.5"]
        alone = ["four>=4"]
        dev = ["lightning-rl[more]"]
    """
    claimed = bounds.claims(project)
    assert claimed == {"one": {"1", "1.5"}, "two": {"2.0"}, "three": {"3.1"}}
    assert bounds.untrue(claimed, "one==1.5.0\ntwo==2\nthree==3.1") == []
    assert bounds.untrue(claimed, "one==1.4\ntwo==2.1\nthree==3.1") == [
        "one: 1 and 1.5 claimed, 1.4 installed",
        "two: 2.0 claimed, 2.1 installed",
    ]


def test_the_page_of_licences_names_every_locked_package() -> None:
    page = (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \S.* \| ([a-z0-9-]+(?:, [a-z0-9-]+)*) \|$", page.removeprefix(licences.HEAD), re.MULTILINE)
    listed = {name for row in rows for name in row.split(", ")}
    assert sorted(PINS.keys() - listed) == []
    assert page.startswith(licences.HEAD) and "not said" not in page
