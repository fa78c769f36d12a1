"""The recipes of the pretrained model: the command of the Makefile, and messages for a missing model or checkpoint."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / words[0]), *words[1:]]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_the_command_of_make_model_finds_a_converted_model_and_refuses_another_folder(tmp_path: Path) -> None:
    found = re.search(r"^\$\(MODEL\):.*\n\t\$\(BIN\)/python (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found
    words = found[1].replace("$@", "model").split()
    (tmp_path / "model").mkdir()
    refused = run(*words, folder=tmp_path)
    assert refused.returncode and "expected a folder with model.safetensors, or none, got model" in refused.stderr
    (tmp_path / "model" / "model.safetensors").touch()
    ran = run(*words, folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "model exists\n"), ran.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "expected the model in the folder models/SmolLM2-135M-Instruct, which does not exist: make model"),
        (("--policy", ".", "--ckpt_path", "no.ckpt"), "expected a checkpoint, got --ckpt_path no.ckpt, which does not"),
    ],
)
def test_what_is_missing_is_said_in_one_line(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    ran = run("recipes/laptop.py", *words, folder=tmp_path)
    assert ran.returncode == 1 and ran.stderr.startswith(message) and ran.stderr.count("\n") == 1
