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
from lightning_rl.reporting.folder import read_folder
from lightning_rl.reporting.summary import COLUMNS, summary_line


def test_a_line_holds_the_logged_figures(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    module = tiny_module(minibatches=2, optimizer=partial(AdamW, lr=0.05))
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        fit(module, callbacks=[RolloutSummary(2), SignalLedger()], data=tiny_prompts(12, 4), logger=logger)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("rollout ")]
    lines = [line for line in lines if "  reward " in line]
    metrics = read_folder([tmp_path]).metrics
    figures = {name: metrics[name][5] for name in COLUMNS if name in metrics}
    assert [line.split("  ")[0] for line in lines] == ["rollout 0", "rollout 2"]
    assert lines[1] == summary_line(2, figures) and re.search(r"used \d+%", lines[1])


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_a_line_stands_above_the_bar(bar: type, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tiny_module(), callbacks=[bar(), RolloutSummary()], data=tiny_prompts(8, 4), enable_progress_bar=True)
    printed = capsys.readouterr()
    text = re.sub(r"\s+", " ", printed.out + printed.err)
    assert len(re.findall(r"rollout [01] reward [\d.]+ kl ", text)) == 2


def test_what_is_beyond_normal_is_marked() -> None:
    figures = {"kl/rollout": 0.2, "kl/old": 9.0, "signal_audit/findings": 2.0, "tokens_per_second": 12345.6}
    assert summary_line(7, figures) == "rollout 7  kl 0.2!  findings 2!  tokens/s 12346"
    assert summary_line(7, {"length/truncated": 0.25}) == "rollout 7  cut off 25%!"


def test_a_summary_changes_nothing_of_a_run() -> None:
    modules = [tiny_module(minibatches=2) for _ in range(2)]
    fit(modules[0], data=tiny_prompts(8, 4))
    fit(modules[1], callbacks=[RolloutSummary()], data=tiny_prompts(8, 4))
    one, other = map(weights_of, modules)
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(ValueError, match="expected every_n_rollouts to be a whole number above 0, got 0"):
        RolloutSummary(0)
