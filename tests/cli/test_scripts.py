"""Errors for files that are no scripts, and for exceptions of scripts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.support import tiny_module

from lightning_rl.audit import recheck
from lightning_rl.cli.main import main
from lightning_rl.cli.recipes import load_recipe


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("nope.py", None, "to be a script that calls Trainer.fit, got no such file$", id="missing"),
        pytest.param("", None, "got a folder: name the file in it$", id="folder"),
        pytest.param("a.yaml", b"a: 1", r"train.py -- fit --config .*a.yaml$", id="configuration"),
        pytest.param("binary.py", b"\x00\x01", "to be a Python script, got .*null bytes", id="binary"),
        pytest.param("latin.py", b"'\xe4'\n", "to be a Python script, got .*utf-8", id="encoding"),
        pytest.param("open.py", b"1\nx = (\n", r"to be a Python script, got line 2: '\(' was never", id="syntax"),
    ],
)
def test_what_is_no_script_is_refused_by_every_command(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    script = tmp_path / name
    if content is not None:
        script.write_bytes(content)
    for command in (["doctor"], ["resume-check"], ["report", "run", "--recipe"], ["replay", "one.json", "--against"]):
        with pytest.raises(SystemExit, match=message):
            main([*command, str(script)])


def test_a_missing_script_is_refused_without_torch(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}  # names every import on stderr
    asked = [sys.executable, "-m", "lightning_rl", "doctor", str(tmp_path / "nope.py")]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "got no such file\n" in done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported and "torch" not in imported


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "import os\nimport no_such_module\n",
            "recipe.py, line 2: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("import json\n\njson.loads('{')\n", "recipe.py, line 3: JSONDecodeError: Expecting property name"),
        ("import beside\n", "beside.py, line 2: ZeroDivisionError: division by zero"),
    ],
    ids=["import", "library", "beside"],
)
def test_what_a_recipe_raises_is_told_by_its_own_line(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(text)
    (tmp_path / "beside.py").write_text("1\n1 / 0\n")
    with pytest.raises(SystemExit) as ended:
        load_recipe(tmp_path / "recipe.py", [])
    assert str(ended.value).startswith(str(tmp_path / sentence))


def test_evidence_that_is_not_there_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nope\.json"):
        recheck(tmp_path / "nope.json", tiny_module().algorithm)
