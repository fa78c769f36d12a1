"""Assets of a report: texts that stay texts, a chart library with its license, one table of metrics."""

import re
from pathlib import Path

import pytest

from lightning_rl.glossary import entry_of, glossary, table
from lightning_rl.reporting.html_report import ASSETS, SCRIPTS, STYLES

ROOT = Path(__file__).parents[2]
OWN = [name for name in SCRIPTS if not name.endswith(".min.js")]
SINKS = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|srcdoc"
SINKS += r"|\beval\b|\bFunction\(|setTimeout\(|setInterval\(|fetch\(|XMLHttpRequest|WebSocket|sendBeacon|\bimport\("


@pytest.mark.parametrize("name", OWN)
def test_a_script_makes_no_markup_and_asks_for_nothing(name: str) -> None:
    text = (ASSETS / name).read_text()
    assert re.findall(SINKS, text) == [] and '"use strict";' in text and len(text.splitlines()) <= 250


def test_the_chart_library_makes_no_markup_either() -> None:
    assert re.findall(SINKS, (ASSETS / "uplot.min.js").read_text()) == []


def test_everything_that_lies_there_is_used() -> None:
    names = {entry.name for entry in ASSETS.iterdir()}
    assert names == {*SCRIPTS, *STYLES, "report.html", "uplot.LICENSE"}
    assert not re.findall(r"url\((?!#)|@import|http", (ASSETS / "report.css").read_text())


def test_the_licence_of_what_is_brought_along_is_said() -> None:
    assert (ASSETS / "uplot.LICENSE").read_text().startswith("The MIT License (MIT)")
    version = re.findall(r"leeoniya/uPlot \(v([\d.]+)\)", (ASSETS / "uplot.min.js").read_text())
    assert f"| uPlot {version[0]} | MIT |" in (ROOT / "docs" / "licences.md").read_text()


def test_the_page_of_metrics_is_made_from_the_glossary() -> None:
    assert table() in (ROOT / "docs" / "metrics.md").read_text(), "python -m lightning_rl.glossary"


def test_every_entry_has_a_meaning_and_an_ordered_range() -> None:
    for entry in glossary():
        assert entry.meaning and (entry.low is None or entry.high is None or entry.low <= entry.high)


@pytest.mark.parametrize(
    ("metric", "part"),
    [
        ("reward/task", "weighted sum"), ("reward_failed/parity", "failed on"), ("reward/parity", "value of one"),
        ("reward_metric/parity/length", "logged"), ("val/sums/pass@8_low", "solved"), ("ledger/weight/used", "reaches"),
        ("ledger/tokens/opsm.sequence_mask", "removed"), ("opsm/rejected", "masks"), ("opsm/delta", "own name"),
        ("env/trail/turns", "environment"), ("time/sync", "each phase"), ("test/sums/reward/task", "trainer.test"),
    ],
)  # fmt: skip
def test_a_metric_finds_its_entry(metric: str, part: str) -> None:
    entry = entry_of(metric)
    assert entry is not None and part in str(entry.to_json()["meaning"])


@pytest.mark.parametrize(
    ("metric", "value", "baseline", "beyond"),
    [
        ("kl/rollout", 0.05, 0.0, False), ("kl/rollout", 0.051, 0.0, True), ("kl/rollout", 4.1, 4.1, False),
        ("kl/rollout", 4.25, 4.0, False), ("kl/rollout", 4.26, 4.0, True), ("kl/rollout", 0.9, 0.2, True),
        ("kl/old", 0.06, 9.0, True), ("kl/ref", 1.0, 0.0, False), ("kl/ref", 1.01, 0.0, True),
        ("kl/ref", -0.1, 0.0, False),
    ],
)  # fmt: skip
def test_a_mismatch_is_what_is_more_than_the_policy_moved(
    metric: str, value: float, baseline: float, beyond: bool
) -> None:
    entry = entry_of(metric)
    assert entry is not None and entry.is_beyond(value, baseline) is beyond


def test_a_baseline_is_a_metric_of_its_own() -> None:
    assert all(entry_of(entry.baseline) is not None for entry in glossary() if entry.baseline)


def test_a_name_that_nobody_logs_has_no_entry() -> None:
    assert entry_of("mine") is None
