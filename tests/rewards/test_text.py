"""Text of both forms of completions, columns by name, and the place of an answer in a text."""

from typing import Any

import pytest

from lightning_rl.rewards import text_of
from lightning_rl.rewards.text import answer_spans


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        pytest.param("", "", id="empty"),
        pytest.param("a\0b", "a\0b", id="nul"),
        pytest.param([{"role": "assistant", "content": "hi"}], "hi", id="chat"),
        pytest.param([{"content": "hi"}], "hi", id="no-role"),
        pytest.param([], "", id="no-message"),
        pytest.param([{"role": "assistant", "content": None}], "", id="tool-call"),
        pytest.param(
            [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}], "ab", id="parts"
        ),
        pytest.param(
            [
                {"role": "assistant", "content": "first"},
                {"role": "tool", "content": "42"},
                {"role": "assistant", "content": "last"},
            ],
            "first\nlast",
            id="tools-are-not-the-policy",
        ),
    ],
)
def test_text_of_either_form(completion: Any, text: str) -> None:
    assert text_of(completion) == text


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        ([1, 2], r"expected a completion as text or as chat messages, got token ids: pass tokenizer= to the module"),
        (4.5, r"expected a completion as text or as chat messages, got 4\.5"),
        ([{"content": 3}], r"expected the content of a message as text or as parts, got 3"),
    ],
)
def test_anything_else_is_refused(completion: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text_of(completion)


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("", []),
        ("no marker", []),
        ("#### 4", ["4"]),
        ("####\n4\n5", ["4"]),
        ("#### 4 and #### 5", ["5", "4 and"]),
        ("The Answer Is: 7.\nBye", [": 7."]),
        (r"\boxed{\frac{1}{2}} or so", [r"\frac{1}{2}"]),
        (r"\boxed{1 + {2", ["1 + {2"]),
        ("answer: " + "x" * 500, ["x" * 199]),
    ],
)
def test_answer_spans_from_the_last_to_the_first(text: str, spans: list[str]) -> None:
    assert list(answer_spans(text)) == spans
