"""Control characters of a model are escaped wherever text is shown."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rl.cli.output import say
from lightning_rl.data import StepIndex
from lightning_rl.evaluation.records import write_records
from lightning_rl.reporting.loggers import log_samples
from lightning_rl.rewards import Rewards
from lightning_rl.rollouts.failures import FailureReport
from lightning_rl.samples import Failure, RewardCall
from lightning_rl.utils.terminal import dump_visible, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, 漢字 and é", "plain, 漢字 and é"),
        ("two\nlines", "two\nlines"),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("a\rb\tc\x00", "a\\rb\\tc\\x00"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\U000e0041\ud800", "\\U000e0041\\ud800"),
        ("", ""),
    ],
)
def test_control_characters_are_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown


HIDDEN = "\u202egnp.exe \x9b31m \x7f \x85 \u2028 \u2066 \U000e0041 \ud800 漢字 é\u00a0x"


def test_json_is_the_same_for_readers_and_does_nothing_where_it_is_printed() -> None:
    written = dump_visible({"text": HIDDEN, HIDDEN: ["\n"]})
    assert json.loads(written) == {"text": HIDDEN, HIDDEN: ["\n"]}
    assert visible(written) == written and len(written.splitlines()) == 1
    assert "漢字 é\u00a0x" in written
    assert "\\u202egnp.exe \\u009b31m \\u007f \\u0085 \\u2028 \\u2066 \\udb40\\udc41 \\ud800" in written
    assert dump_visible([1.5, None], indent=1) == "[\n 1.5,\n null\n]"


def report_of(call: RewardCall) -> FailureReport:
    report = FailureReport(Rewards({call.name: len}))
    report.add([], [call], torch.ones(1, dtype=torch.bool))
    return report


def test_files_of_samples_and_of_failed_rewards_hold_no_control_characters(tmp_path: Path) -> None:
    log_samples([], [{"sample": 1, "response": HIDDEN}], StepIndex(rollout=3, step=0, index=3), tmp_path)
    failure = Failure(rows=(0,), cause=f"raised {HIDDEN}", traceback="")
    ids = [[1]]
    call: Any = RewardCall("own", ids, [0.0], 0.1, prompts=[HIDDEN], completions=[HIDDEN], failures=[failure])
    with pytest.warns(UserWarning, match="rows get no reward"):
        report_of(call).write(tmp_path, "failed.jsonl")
    write_records(tmp_path / "records.jsonl", [{"prompt": HIDDEN, "columns": {"answer": HIDDEN}}])
    for name, keys in (("samples", ["response"]), ("failed", ["completion", "prompt"]), ("records", ["prompt"])):
        text = (tmp_path / f"{name}.jsonl").read_bytes().decode("utf-8")
        assert visible(text) == text
        (line,) = [json.loads(line) for line in text.splitlines()]
        assert all(line[key] == HIDDEN for key in keys)


def test_commands_say_what_is_visible(capsys: pytest.CaptureFixture[str]) -> None:
    say("reward raised \x1b]0;owned\x07\nnext")
    assert capsys.readouterr().out == "reward raised \\x1b]0;owned\\x07\nnext\n"


def test_a_warning_quotes_an_exception_that_quotes_a_completion() -> None:
    failure = Failure(rows=(0,), cause="raised ValueError('no number')", traceback="ValueError: no number in \x1b[2Jx")
    call: Any = RewardCall("own", [[1]], [0.0], 0.1, prompts=["p"], completions=["\x1b[2Jx"], failures=[failure])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cause = report_of(call).write().cause
    assert "\x1b" not in str(caught[0].message) + cause
    assert "no number in \\x1b[2Jx" in str(caught[0].message) and "no number in \\x1b[2Jx" in cause
