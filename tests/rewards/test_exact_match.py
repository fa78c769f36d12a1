"""ExactMatch by hand."""

from typing import Any

import pytest

from lightning_rl.rewards import ExactMatch, TokenF1


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
        ({"ignore_articles": True}, "the  theory of a cat", "theory of cat", 1.0),
        ({"tag": "answer"}, "Rome <answer> Paris </answer> Rome", "Paris", 1.0),
        ({"tag": "answer"}, "<answer>Rome</answer><answer>Paris</answer>", "Paris", 1.0),
        ({"tag": "answer"}, "Paris", "Paris", 0.0),
        ({"tag": "answer"}, "<answer>Paris", "Paris", 0.0),
        ({"tag": "answer"}, "none", "", 0.0),
        ({"tag": "answer", "after": "</think>"}, "<answer>Paris</answer></think>", "Paris", 0.0),
        ({"after": "</think>"}, "Rome? </think> Paris", "Paris", 1.0),
        ({"after": "</think>"}, "Paris", "Paris", 0.0),
        ({"after": "</think>"}, "a</think>b</think>c", "c", 1.0),
    ],
)
def test_table(options: dict[str, Any], completion: str, reference: Any, value: float) -> None:
    assert ExactMatch(**options)(["?"], [completion], answer=[reference]) == [value]


@pytest.mark.parametrize(
    ("completion", "reference", "value"),
    [
        ("Eiffel Tower", "the eiffel tower!", 1.0),
        ("The Eiffel Tower in Paris", "Eiffel tower", 2 / 3),
        ("Tower tower", "tower", 2 / 3),
        ("Rome", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("the", "a", 1.0),
        ("in Paris", ["Rome", "Paris"], 2 / 3),
    ],
)
def test_token_f1(completion: str, reference: Any, value: float) -> None:
    assert TokenF1()(["?"], [completion], answer=[reference]) == [pytest.approx(value)]
    assert TokenF1(tag="a")(["?"], [f"Paris <a>{completion}</a>"], answer=[reference]) == [pytest.approx(value)]
