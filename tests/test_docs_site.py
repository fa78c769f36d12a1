"""The site: every internal link and anchor leads somewhere, every public name and every page has its place."""

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import lightning_rl

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
]
BUILDER = ROOT / ".venv-docs/bin/python"
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LATER = {"report.md", "performance.md", "plan.md"}  # named by the navigation, which leaves out what is not there


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called, on a code host and on the site alike."""
    text = FENCE.sub("", page.read_text())
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "") for title in HEADING.findall(text)]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def links(page: Path) -> list[str]:
    """The relative links of a page."""
    return [target for target in LINK.findall(FENCE.sub("", page.read_text())) if not re.match(r"[a-z]+:", target)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_anchor_leads_somewhere(page: Path) -> None:
    for target in links(page):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name}: {target}"


def test_the_navigation_names_every_page_and_none_that_nobody_writes(site: ModuleType) -> None:
    named = site.named(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert len(named) == len(set(named))
    there = {page.name for page in (ROOT / "docs").glob("*.md")} | {"readme.md", "CHANGELOG.md", "CONTRIBUTING.md"}
    assert set(named) - there - LATER == {"SECURITY.md"}


def test_every_public_name_has_its_place_in_the_reference(site: ModuleType) -> None:
    assert set(site.public_names("lightning_rl")) == {*lightning_rl.__all__} - {"__version__"}
    for module in site.REFERENCE:
        names = site.public_names(module)
        assert names and all(hasattr(importlib.import_module(module), name) for name in names), module


def test_what_lies_outside_of_the_pages_becomes_a_page_of_the_site(
    site: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "BUILD", tmp_path)
    monkeypatch.setattr(site, "PAGES", tmp_path / "pages")
    site.stage()
    text = (tmp_path / "pages" / "architecture.md").read_text()
    assert "](source/lightning_rl/module.py.md)" in text and "](../" not in FENCE.sub("", text)
    for page in (tmp_path / "pages").glob("*.md"):
        for target in links(page):
            name = target.partition("#")[0]
            assert not name or (page.parent / name).exists(), f"{page.name}: {target}"
    config = yaml.safe_load((tmp_path / "mkdocs.yml").read_text())
    named = site.named(config["nav"])
    assert {page.name for page in (tmp_path / "pages").glob("*.md")} <= set(named)
    assert all((tmp_path / "pages" / name).exists() for name in named)


def test_a_link_to_nothing_ends_the_build(site: ModuleType) -> None:
    with pytest.raises(FileNotFoundError, match=r"links to nothing\.md"):
        site.rewrite("[x](nothing.md)", ROOT / "docs" / "index.md", set())


@pytest.mark.slow
@pytest.mark.skipif(not BUILDER.exists(), reason="no environment with the builder of the site: make docs makes one")
def test_the_site_builds_without_a_warning() -> None:
    done = subprocess.run([str(BUILDER), "docs/site.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
