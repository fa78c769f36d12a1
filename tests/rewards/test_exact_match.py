"""ExactMatch by hand."""

from typing import Any

import pytest

from lightning_rl.rewards import ExactMatch


@pytest.mark.parametrize(
    ("options", "completion", "reference", "value"),
    [
        ({}, "Paris", "Paris", 1.0),
        ({}, " Paris\n", "Paris", 1.0),
        ({}, "paris", "Paris", 0.0),
        ({}, "", "Paris", 0.0),
        ({}, "", "", 1.0),
        ({}, "Paris\0", "Paris", 0.0),
        ({}, "b", ["a", "b"], 1.0),
        ({}, "c", ["a", "b"], 0.0),
        ({"ignore_case": True}, "STRASSE", "Stra\u00dfe", 1.0),
        ({}, "New\n  York", "New York", 0.0),
        ({"ignore_punctuation": True}, "It's $5.", "Its 5", 1.0),
        ({"after": "</think>"}, "Rome? </think> Paris", "Paris", 1.0),
        ({"after": "</think>"}, "Paris", "Paris", 0.0),
        ({"after": "</think>"}, "a</think>b</think>c", "c", 1.0),
    ],
)
def test_table(options: dict[str, Any], completion: str, reference: Any, value: float) -> None:
    assert ExactMatch(**options)(["?"], [completion], answer=[reference]) == [value]
