"""The site: every internal link and anchor leads somewhere, every public name and every page has its place."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from kit.browser import chromium

import lightning_rl

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
]
SITE = ROOT / "build/docs/site"
BUILDER = ROOT / ".venv-docs/bin/python"
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def script(name: str) -> ModuleType:
    """A script of the pages' folder, which is no package, as a module."""
    sys.path.append(str(ROOT / "docs"))  # what lies beside it, as when it runs
    try:
        spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return module


@pytest.fixture(scope="module")
def site() -> ModuleType:
    return script("site")


@pytest.fixture(scope="module")
def built() -> Path:
    """Build the site and return its folder."""
    if not BUILDER.exists():
        pytest.skip("no environment with the builder of the site: make docs")
    done = subprocess.run([str(BUILDER), "docs/site.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return SITE


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, which are the same on a code host and on the site."""
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
    assert set(named) - there == {"SECURITY.md"}


def test_every_public_name_has_its_place_in_the_reference(site: ModuleType) -> None:
    assert set(site.public_names("lightning_rl")) == {*lightning_rl.__all__} - {"__version__"}
    for module in site.REFERENCE:
        names = site.public_names(module)
        assert names and all(hasattr(importlib.import_module(module), name) for name in names), module


@pytest.mark.nightly
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


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ('<a href="b.html#there">x</a> <a href="#here" id="here">x</a> <a href="https://a.b/c">x</a>', None),
        ('<img src="data:image/png;base64,AA==">', None),
        ('<a href="c.html">x</a>', "links to c.html, which is not there"),
        ('<a href="b.html#gone">x</a>', "links to b.html#gone, which has no such place"),
        ('<img src="gone.svg">', "links to gone.svg, which is not there"),
        ('<script src="https://a.b/c.js"></script>', "fetches https://a.b/c.js from another host"),
        ('<link rel="stylesheet" href="//a.b/c.css">', "fetches //a.b/c.css from another host"),
    ],
)
def test_a_dead_link_and_a_file_of_another_host_end_the_build(
    page: str, complaint: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.html").write_text(page)
    (tmp_path / "b.html").write_text('<h1 id="there">x</h1>')
    assert script("links").main(tmp_path) == int(complaint is not None)
    assert capsys.readouterr().err == ("" if complaint is None else f"a.html: {complaint}\n")


def test_a_docstring_becomes_markdown_with_its_formulas() -> None:
    text = "One :class:`~lightning_rl.Rollout`, :math:`a b`.\n\n.. math::\n    x = y\n\nMore."
    assert script("roles").markdown(text) == "One `Rollout`, $a b$.\n\n$$\nx = y\n$$\n\nMore."


def test_a_link_to_a_public_name_in_a_file_leads_to_the_reference(site: ModuleType) -> None:
    page = ROOT / "docs" / "algorithms.md"
    for target, name in (
        ("callbacks/opsm.py#OPSM", "callbacks.OPSM"),
        ("lightning_rl/losses/gspo.py#GSPO", "losses.GSPO"),
    ):
        module = f"lightning_rl.{name.partition('.')[0]}"
        assert site.site_link(f"../{target}", page, set()) == f"reference/{module}.md#lightning_rl.{name}"
    assert site.site_link("figures/GSPO.svg", page, set()) == "figures/GSPO.svg"


@pytest.mark.nightly
def test_the_site_builds_without_a_warning_or_a_dead_link(built: Path) -> None:
    assert (built / "index.html").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("width", [1280, 400])
def test_a_word_is_found_from_a_folder_without_a_request(built: Path, width: int, tmp_path: Path) -> None:
    with chromium(tmp_path) as browser:
        browser.size(width)
        browser.call("Page.navigate", url=(built / "index.html").as_uri())
        browser.wait("document.readyState === 'complete' && Boolean(window.__index)")
        shown = "[...document.querySelectorAll('{}')].some((e) => e.getClientRects().length && e.offsetWidth > 20)"
        browser.wait(shown.format(".md-search__input" if width > 1000 else "label[for=__search].md-header__button"))
        typed = "const e = document.querySelector('.md-search__input'); e.focus(); e.value = 'IcePop';"
        browser.ask(f"(() => {{ {typed} e.dispatchEvent(new KeyboardEvent('keyup')); }})()")
        browser.wait("document.querySelectorAll('.md-search-result__link').length > 0")
        assert browser.said == []
        assert [address for address in browser.requests if not address.startswith(("file:", "data:", "about:"))] == []


@pytest.mark.nightly
def test_formulas_are_drawn_by_the_browser_alone(built: Path) -> None:
    text = (built / "reference" / "lightning_rl.losses.html").read_text()
    assert text.count('<div class="formula"><math') >= 12 and "arithmatex" not in text
