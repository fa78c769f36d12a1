"""Installs: ``callbacks/`` becomes ``lightning_rl.callbacks`` in each of them."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

from lightning_rl import callbacks
from lightning_rl.cli.main import MODULES

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = {"LICENSE", "MANIFEST.in", "README.md", "callbacks", "lightning_rl", "pyproject.toml"}
TOP_LEVEL = SHIPPED | {"CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "SECURITY.md", "benchmarks", "docs", "recipes"}
TOP_LEVEL |= {"CITATION.cff", "launch", "mkdocs.yml", "requirements.lock", "requirements-dev.lock", "tests"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES, VERSION = PROJECT["tool"]["setuptools"]["packages"], PROJECT["project"]["version"]

OFFLINE = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]

# Runs without `site`, or an editable install of the checkout would answer for the one under test; `addsitedir` reads
# the .pth file by which an editable install is found.
PROBE = """
import importlib, json, site, sys
installed, dependencies, *packages = sys.argv[1:]
site.addsitedir(installed)
sys.path.append(dependencies)
print(json.dumps([importlib.import_module(package).__file__ for package in packages]))
"""

INSTALLED = """
import inspect
from importlib.metadata import version
from lightning_rl.callbacks import OPSM
print(version("lightning-rl"), inspect.getfile(OPSM), sep="\\n")
"""
NO_NETWORK = """
import sys
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise RuntimeError(f"expected no network, got {event} {arguments}")
sys.addaudithook(refuse)
"""
IMPORT = """
import sys
folder, dependencies, statement = sys.argv[1:]
sys.path[:0] = [folder, dependencies]
exec(statement)
"""


def run(folder: Path, *command: str | Path) -> str:
    """Returns what ``command`` prints, or fails the test with it."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it could name the checkout
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=clean)
    if done.returncode:
        pytest.fail(f"{done.stdout}\n{done.stderr}")
    return done.stdout


def imported_files(installed: Path, *what: str | Path) -> list[Path]:
    """Returns the file of each package, the typing marker and a page, as imported once ``what`` is ``installed``."""
    installed.mkdir()
    run(installed, sys.executable, "-m", "pip", "install", *OFFLINE, "--target", installed, *what)
    printed = run(installed, sys.executable, "-ISc", PROBE, installed, sysconfig.get_path("purelib"), *PACKAGES)
    files = [Path(file) for file in json.loads(printed)]
    page = files[0].parent / "reporting" / "assets" / "report.html"
    return [*files, files[0].with_name("py.typed"), page]


def copy_of_tree(copy: Path) -> Path:
    """A copy of what is shipped: a build neither writes into the checkout nor finds an earlier build's leftovers."""
    copy.mkdir()
    for source in (ROOT / name for name in SHIPPED):
        if source.is_dir():
            shutil.copytree(source, copy / source.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    return copy


@pytest.fixture(params=["linked", pytest.param("unlinked", marks=pytest.mark.nightly)])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the tree, as git makes it with and without links."""
    copy = copy_of_tree(tmp_path / "tree")
    if request.param == "unlinked":  # a checkout where git cannot make symbolic links
        link = copy / "lightning_rl" / "callbacks"
        link.unlink()
        link.write_text("../callbacks")
    return copy


@pytest.mark.nightly
def test_a_wheel_from_the_sdist_brings_every_package(tree: Path, tmp_path: Path) -> None:
    run(tmp_path, sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", tree)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    files = imported_files(tmp_path / "installed", wheel)
    assert all(file.is_file() and file.is_relative_to(tmp_path / "installed") for file in files), files


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["wheel", pytest.param("sdist", marks=pytest.mark.nightly)])
def test_a_clean_environment_runs_what_was_built(kind: str, tmp_path: Path) -> None:
    built, clean = tmp_path / "dist", tmp_path / "clean"
    tree = copy_of_tree(tmp_path / "tree")
    run(tmp_path, sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", built, tree)
    shutil.rmtree(tree)
    run(tmp_path, sys.executable, "-m", "venv", "--without-pip", clean)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(clean), "platbase": str(clean)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    (site / "sitecustomize.py").write_text(NO_NETWORK)
    pip = [sys.executable, "-m", "pip", "--python", clean / "bin" / "python", "install"]
    run(tmp_path, *pip, *OFFLINE, *built.iterdir())
    shown = run(tmp_path, clean / "bin" / "lightning-rl", "--help")
    assert all(command in shown for command in MODULES)
    said = run(tmp_path, clean / "bin" / "python", "-c", INSTALLED)
    assert said.splitlines() == [VERSION, str(site / "lightning_rl" / "callbacks" / "opsm.py")]


@pytest.mark.nightly
def test_editable_install_imports_the_tree(tree: Path, tmp_path: Path) -> None:
    files = imported_files(tmp_path / "installed", "--editable", tree)
    assert all(file.is_file() and file.is_relative_to(tree) for file in files), files


@pytest.mark.nightly
def test_the_sdist_carries_everything_that_is_tracked(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("only a git checkout knows which files belong to it")
    tracked = {file for file in run(ROOT, "git", "ls-files", "-z").split("\0") if file and not file.startswith(".")}
    for file in tracked:
        target = tmp_path / "tree" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, target, follow_symlinks=False)
    built = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", tmp_path, tmp_path / "tree"]
    run(tmp_path, *built)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        carried = {name.partition("/")[2] for name in opened.getnames()}
    assert tracked - carried == {"lightning_rl/callbacks"}  # a link to what is carried beside it
    assert {"recipes/quickstart.py", "docs/concepts.md", "tests/conftest.py", "Makefile"} <= carried


def refusal(folder: Path, statement: str) -> str:
    """The last line that Python says of a statement, run beside a tree and without any installed one."""
    command = [sys.executable, "-ISc", IMPORT, folder, sysconfig.get_path("purelib"), statement]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    return done.stderr.splitlines()[-1]


@pytest.mark.nightly
def test_a_second_copy_of_every_class_is_refused() -> None:
    said = refusal(ROOT, "from callbacks.opsm import OPSM")
    assert said.startswith("ImportError: expected import lightning_rl.callbacks, got import callbacks")


def test_every_package_is_listed() -> None:
    folders = {file.parent.relative_to(ROOT) for file in (ROOT / "lightning_rl").rglob("__init__.py")}
    assert {".".join(folder.parts) for folder in folders} | {"lightning_rl.callbacks"} == set(PACKAGES)


def test_callbacks_are_reached_through_a_link() -> None:
    link = ROOT / "lightning_rl" / "callbacks"  # a text file where git cannot make links
    assert (link.readlink().as_posix() if link.is_symlink() else link.read_text()) == "../callbacks"


def test_every_callback_file_is_exported() -> None:
    exported = {getattr(callbacks, name).__module__ for name in callbacks.__all__}
    files = {f"lightning_rl.callbacks.{file.stem}" for file in (ROOT / "callbacks").glob("[!_]*.py")}
    assert files <= exported


def test_a_release_has_one_number_and_one_day() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["[Unreleased]", f"[{VERSION}] - {citation['date-released']}"]
    assert citation["version"] == VERSION and set(citation["license"]) == set(
        PROJECT["project"]["license"].split(" AND ")
    )


def test_templates_are_forms_of_which_every_field_has_a_name() -> None:
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    if not folder.exists():
        pytest.skip("only a git checkout has them")
    for file in sorted({*folder.glob("*.yml")} - {folder / "config.yml"}):
        form = yaml.safe_load(file.read_text())
        assert {"name", "description", "body"} <= set(form)
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert fields and all(field["attributes"]["label"] for field in fields)
        assert len({field["id"] for field in fields}) == len(fields)


def test_top_level_holds_nothing_unexpected() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("only a git checkout knows which files belong to it")
    tracked = {Path(file).parts[0] for file in run(ROOT, "git", "ls-files", "-z").split("\0") if file}
    assert {name for name in tracked if not name.startswith(".")} <= TOP_LEVEL
