"""The packages of the report are checked before training; a prompt and its completions are a row of the table."""

from importlib.util import find_spec
from operator import eq
from typing import Any, cast

import learning_report
import pytest
from rich.console import Console


def test_a_missing_extra_is_named_before_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning_report, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    nothing = cast(Any, None)  # is not reached
    with (
        pytest.raises(SystemExit, match=r"expected matplotlib for the report: pip install 'lightning-rl\[report\]'"),
        learning_report.report(nothing, nothing, nothing, rows=[], right=eq, title=""),
    ):
        pytest.fail("the fit began")


def test_the_table_shows_the_last_message_of_a_chat_and_marks_completions() -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "first"}, {"role": "user", "content": "sum?"}], "answer": "7"},
        {"prompt": "text", "answer": "8"},
        {
            "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "color?"}]}],
            "answer": "red",
        },
    ]
    table = learning_report.completion_table(rows, ["6", "8", "red"], ["7", "9", "blue"], right=eq, title="Sums")
    console = Console(width=80)
    with console.capture() as output:
        console.print(table)
    lines = [line.replace("│", " ").split() for line in output.get().splitlines()]
    assert ["sum?", "x", "6", "ok", "7"] in lines and ["text", "ok", "8", "x", "9"] in lines
    assert ["[image]", "color?", "ok", "red", "x", "blue"] in lines
