"""Rollout summary: a line for each rollout with the logged figures, above the bar, that changes nothing of a run."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from kit.support import fit, tiny_module, tiny_prompts, weights_of
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch.optim import AdamW

from lightning_rl.audit import SignalLedger
from lightning_rl.reporting import RolloutSummary
from lightning_rl.reporting.run_files import read_folder
from lightning_rl.reporting.summary import COLUMNS, SHARES, summary_header, summary_line


def test_a_line_holds_the_logged_figures(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    module = tiny_module(minibatches_per_rollout=2, optimizer=partial(AdamW, lr=0.05))
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        fit(module, callbacks=[RolloutSummary(2), SignalLedger()], data=tiny_prompts(12, 4), logger=logger)
    said = [record.getMessage() for record in caplog.records]
    header = next(line for line in said if line.startswith("rollout   reward"))
    lines = [line for line in said if re.match(r" +\d+ ", line)]
    metrics = read_folder([tmp_path]).metrics
    columns = [name for name in COLUMNS if name in metrics]
    figures = {name: metrics[name][5] for name in columns}
    assert header == summary_header(columns) and "used" in header
    assert lines[0].split()[0] == "0" and lines[1:] == [summary_line(2, figures, columns)]
    assert re.search(r" \d+%", lines[1])


@pytest.mark.usefixtures("notebook")
@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_a_line_stands_above_the_bar(bar: type, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tiny_module(), callbacks=[bar(), RolloutSummary()], data=tiny_prompts(8, 4), enable_progress_bar=True)
    printed = capsys.readouterr().out.splitlines()
    (header,) = (place for place, line in enumerate(printed) if line.startswith("rollout   reward"))
    assert [line.split()[0] for line in printed[header + 1 :] if re.match(r" +\d+ ", line)] == ["0", "1"]


def test_figures_stand_below_their_words_and_what_is_beyond_normal_is_marked() -> None:
    figures = {"kl/rollout": 0.2, "kl/old": 0.1, "signal_audit/findings": 2.0, "tokens_per_second": 12345.6}
    columns = [name for name in COLUMNS if name in figures]
    header, line = summary_header(columns), summary_line(7, figures, columns)
    assert header == "rollout       kl  findings  tokens/s"
    assert line == "      7    0.200!        2!    12346"
    assert summary_line(7, {"kl/rollout": 4.1, "kl/old": 4.1}, ["kl/rollout"]) == "      7     4.10"  # the policy moved
    assert summary_line(7, {"length/truncated": 0.25}, ["length/truncated"]) == "      7        25%!"


def test_every_figure_keeps_its_column() -> None:
    columns = list(COLUMNS)
    ends = [match.end() for match in re.finditer(r"\S+", summary_header(columns))]
    for value in (0.0, 4.7e-10, -1.3e-5, -0.00123456, 123.456, 54321.0, -0.25, float("nan"), float("inf")):
        line = summary_line(3, {name: min(value, 1.0) if name in SHARES else value for name in columns}, columns)
        assert [match.end() for match in re.finditer(r"[^ !]+", line)] == ends, line


def test_the_words_are_said_again_when_a_metric_is_new_and_after_a_screen(caplog: pytest.LogCaptureFixture) -> None:
    summary, trainer = RolloutSummary(), fit(tiny_module())
    caplog.set_level("INFO", "lightning.pytorch.utilities.rank_zero")
    caplog.clear()
    for rollout in range(45):
        new = {"ledger/weight/used": 0.5} if rollout % 10 == 3 else {}
        summary.show(trainer, rollout, {"reward/task": 0.5, **new})
    words = [record.getMessage().split()[0] for record in caplog.records]
    assert [words[place + 1] for place, word in enumerate(words) if word == "rollout"] == ["0", "3", "23", "43"]


def test_a_summary_changes_nothing_of_a_run() -> None:
    modules = [tiny_module(minibatches_per_rollout=2) for _ in range(2)]
    fit(modules[0], data=tiny_prompts(8, 4))
    fit(modules[1], callbacks=[RolloutSummary()], data=tiny_prompts(8, 4))
    one, other = map(weights_of, modules)
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(ValueError, match="expected every_n_rollouts to be a whole number above 0, got 0"):
        RolloutSummary(0)
