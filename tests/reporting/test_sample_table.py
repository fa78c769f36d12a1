"""Sample table: which samples it shows, what reaches the terminal, and that it changes nothing of a run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit, rollout_of, tiny_module, tiny_prompts, tiny_tokenizer, weights_of
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from lightning_rl.reporting import SampleTable
from lightning_rl.reporting.sample_table import choose_rows, format_table

SAMPLE: dict[str, Any] = {"sample": 3, "reward/task": 0.5, "prompt": "a b", "response": "\x1b[31mc\x07 <b>[red]d"}


def test_the_best_and_the_worst_of_each_group_are_shown() -> None:
    rewards, masked = [0.0, 1.0, 0.5, 2.0, 3.0, 1.0], [True, True, True, True, True, False]
    rollout = rollout_of(rewards, [[1]] * 6, groups=[0, 0, 0, 7, 7, 7], rewarded=masked)
    assert choose_rows(rollout, 4) == [1, 0, 4, 5]
    assert choose_rows(rollout, 3) == [1, 0, 4]
    assert choose_rows(rollout_of([1.0], [[1]]), 4) == [0]


def test_what_a_model_wrote_cannot_act_on_a_terminal() -> None:
    shown = format_table("Samples", [SAMPLE], 40)
    assert "\x1b" not in shown and "\x07" not in shown
    assert "\\x1b[31mc\\x07" in shown and "0.5" in shown


def test_long_text_loses_its_middle() -> None:
    shown = format_table("Samples", [{"sample": 3, "reward/task": None, "response": "a" * 50 + "b" * 50}], 25)
    assert shown == f"Samples\nsample 3  reward -\n  response  {'a' * 10} ... {'b' * 10}"


def test_a_reward_that_stands_alone_is_shown_once() -> None:
    sample = {"reward/task": 0.25, "reward/right": 0.25}
    assert "right" not in format_table("Samples", [sample], 40)
    assert "right" in format_table("Samples", [{**sample, "reward/right": 0.5}], 40)
    assert "short" in format_table("Samples", [{**sample, "reward/short": 0.25}], 40)


@pytest.mark.usefixtures("notebook")
@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_a_table_stands_above_the_bar(bar: type, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"enable_progress_bar": True, "default_root_dir": tmp_path}
    fit(tiny_module(), callbacks=[bar(), SampleTable(1, rows=1)], data=tiny_prompts(4, 4), **options)
    printed = capsys.readouterr().out.splitlines()
    (title,) = (place for place, line in enumerate(printed) if line.strip() == "Samples of rollout 0")
    assert printed[title + 1].startswith("sample ") and "reward" in printed[title + 1]


def test_lines_lie_beside_the_run_of_a_logger_without_tables(tmp_path: Path) -> None:
    module, data = tiny_module(tokenizer=tiny_tokenizer(), minibatches_per_rollout=2), tiny_prompts(12, 4)
    fit(module, callbacks=[SampleTable(2, rows=2)], data=data, logger=CSVLogger(tmp_path, name="", version=""))
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [line["rollout"] for line in lines] == [0, 0, 2, 2]
    assert all({"reward/task", "reward/parity_reward", "finish", "tokens"} <= set(line) for line in lines)
    for line in lines:
        assert line["reward/task"] == line["tokens"] % 2  # of the very sample that is shown
        assert len(line["response"].split()) == line["tokens"]


def test_a_table_changes_nothing_of_a_run(tmp_path: Path) -> None:
    without, with_table = tiny_module(), tiny_module()
    fit(without)
    fit(with_table, callbacks=[SampleTable(1)], default_root_dir=tmp_path)
    for name, weight in weights_of(without).items():
        assert torch.equal(weights_of(with_table)[name], weight), name


def test_numbers_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="expected every_n_rollouts to be a whole number above 0, got 0"):
        SampleTable(0)
