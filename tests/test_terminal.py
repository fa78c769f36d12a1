"""What a model wrote is shown and not acted on, wherever a person sees it."""

import warnings
from typing import Any

import pytest

from lightning_rl.cli.output import say
from lightning_rl.rewards.call import Failure, RewardCall
from lightning_rl.rewards.failures import report_failures
from lightning_rl.terminal import visible


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


def test_commands_say_what_is_visible(capsys: pytest.CaptureFixture[str]) -> None:
    say("reward raised \x1b]0;owned\x07\nnext")
    assert capsys.readouterr().out == "reward raised \\x1b]0;owned\\x07\nnext\n"


def test_a_warning_quotes_an_exception_that_quotes_a_completion() -> None:
    failure = Failure(rows=(0,), cause="raised ValueError('no number')", traceback="ValueError: no number in \x1b[2Jx")
    call: Any = RewardCall("own", [[1]], [0.0], 0.1, prompts=["p"], completions=["\x1b[2Jx"], failures=[failure])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cause = report_failures([call], None)
    assert "\x1b" not in str(caught[0].message) + cause
    assert "no number in \\x1b[2Jx" in str(caught[0].message) and "no number in \\x1b[2Jx" in cause
