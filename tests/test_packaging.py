"""What a user installs: ``callbacks/`` arrives as ``lightning_rl.callbacks``, however the library is installed."""

import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from pathlib import Path

import pytest

from lightning_rl import callbacks

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = {"LICENSE", "MANIFEST.in", "README.md", "callbacks", "lightning_rl", "pyproject.toml"}
TOP_LEVEL = SHIPPED | {"CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "SECURITY.md", "benchmarks", "docs", "recipes"}
TOP_LEVEL |= {"mkdocs.yml", "requirements.lock", "tests"}
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]

# Runs without `site`, or an editable install of the checkout would answer for the one under test; `addsitedir` reads
# the .pth file by which an editable install is found.
PROBE = """
import importlib, json, site, sys
installed, dependencies, *packages = sys.argv[1:]
site.addsitedir(installed)
sys.path.append(dependencies)
print(json.dumps([importlib.import_module(package).__file__ for package in packages]))
"""


IMPORT = """
import sys
folder, dependencies, statement = sys.argv[1:]
sys.path[:0] = [folder, dependencies]
exec(statement)
"""


def run(folder: Path, *command: str | Path) -> str:
    """Returns what ``command`` prints, or fails the test with it."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{done.stdout}\n{done.stderr}")
    return done.stdout


def imported_files(installed: Path, *what: str | Path) -> list[Path]:
    """Returns the file of each package, the typing marker and a page, as imported once ``what`` is ``installed``."""
    installed.mkdir()
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    run(installed, sys.executable, "-m", "pip", "install", *offline, "--target", installed, *what)
    printed = run(installed, sys.executable, "-ISc", PROBE, installed, sysconfig.get_path("purelib"), *PACKAGES)
    files = [Path(file) for file in json.loads(printed)]
    page = files[0].parent / "reporting" / "assets" / "report.html"
    return [*files, files[0].with_name("py.typed"), page]


@pytest.fixture(params=["linked", "unlinked"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what is shipped: a build neither writes into the checkout nor finds an earlier build's leftovers."""
    copy = tmp_path / "tree"
    copy.mkdir()
    for source in (ROOT / name for name in SHIPPED):
        if source.is_dir():
            shutil.copytree(source, copy / source.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    if request.param == "unlinked":  # a checkout where git cannot make symbolic links
        link = copy / "lightning_rl" / "callbacks"
        link.unlink()
        link.write_text("../callbacks")
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--wheel"], []], ids=["from-the-tree", "from-the-sdist"])
def test_wheel_brings_every_package(tree: Path, tmp_path: Path, options: list[str]) -> None:
    run(tmp_path, sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", *options, tree)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    files = imported_files(tmp_path / "installed", wheel)
    assert all(file.is_file() and file.is_relative_to(tmp_path / "installed") for file in files), files


@pytest.mark.slow
def test_editable_install_imports_the_tree(tree: Path, tmp_path: Path) -> None:
    files = imported_files(tmp_path / "installed", "--editable", tree)
    assert all(file.is_file() and file.is_relative_to(tree) for file in files), files


@pytest.mark.slow
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
    assert {"recipes/quickstart.py", "docs/lightning.md", "tests/conftest.py", "Makefile"} <= carried


def refusal(folder: Path, statement: str) -> str:
    """The last line that Python says of a statement, run beside a tree and without any installed one."""
    command = [sys.executable, "-ISc", IMPORT, folder, sysconfig.get_path("purelib"), statement]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    return done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("statement", ["import lightning_rl.callbacks", "from lightning_rl.callbacks import OPSM"])
def test_a_link_that_became_a_text_file_is_named(statement: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "lightning_rl", tmp_path / "lightning_rl", ignore=shutil.ignore_patterns("callbacks"))
    (tmp_path / "lightning_rl" / "callbacks").write_text("../callbacks")
    said = refusal(tmp_path, statement)
    assert said.startswith("ImportError: expected ") and "to be a link to ../callbacks, got a text file" in said
    assert "pip install -e ." in said and "git config core.symlinks true" in said


@pytest.mark.slow
@pytest.mark.parametrize("statement", ["import callbacks", "from callbacks.opsm import OPSM"])
def test_a_second_copy_of_every_class_is_refused(statement: str) -> None:
    said = refusal(ROOT, statement)
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


def test_top_level_holds_nothing_unexpected() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("only a git checkout knows which files belong to it")
    tracked = {Path(file).parts[0] for file in run(ROOT, "git", "ls-files", "-z").split("\0") if file}
    assert {name for name in tracked if not name.startswith(".")} <= TOP_LEVEL
