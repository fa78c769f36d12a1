"""The GSM8K recipe runs from its own command line, on real rows, and its small policy learns."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_gsm8k import IGNORED, SPECIAL, bundled_rows, tiny_tokenizer, warm_start_batches

from lightning_rl.rewards import NumberMatch

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "gsm8k.py"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2))
def test_the_validation_reward_rises(seed: int, tmp_path: Path) -> None:
    command = [sys.executable, RECIPE, "--tiny", "--seed", str(seed)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    figures = {
        name: (float(before), float(after))
        for name, before, after in re.findall(r"^(\S+) before=(\S+) after=(\S+)$", ran.stderr, re.MULTILINE)
    }
    before, after = figures["val/sampled/reward/task"]
    assert after > before + 0.02
    (folder,) = (tmp_path / "runs" / "gsm8k").iterdir()
    rows = (folder / "metrics.csv").read_text().splitlines()
    assert "reward/correct" in rows[0] and len(rows) > 24
    assert {file.name for file in (folder / "checkpoints").iterdir()} >= {"last.ckpt"}
    assert len(list((folder / "evaluations" / "sampled").iterdir())) >= 4


def test_the_tokenizer_keeps_every_question() -> None:
    tokenizer = tiny_tokenizer()
    for row in bundled_rows("test"):
        assert tokenizer.decode(tokenizer(row["question"])["input_ids"]) == row["question"]


def test_the_warm_start_ends_each_row_with_its_answer() -> None:
    ids, labels = next(warm_start_batches(0))
    tokenizer = tiny_tokenizer()
    targets = [row[mask] for row, mask in zip(labels, labels != IGNORED, strict=True)]
    assert all(str(tokenizer.decode(target)).startswith("#### ") for target in targets)
    assert all(str(tokenizer.decode(target)).endswith(SPECIAL[0]) for target in targets)
    assert torch.equal(ids[labels != IGNORED], labels[labels != IGNORED])


def test_every_bundled_answer_is_right() -> None:
    rows = bundled_rows("train") + bundled_rows("test")
    answers = [row["answer"] for row in rows]
    assert NumberMatch(strict=True)(["?"] * len(rows), answers, completion_ids=[], answer=answers) == [1.0] * 1200
