"""Text of both forms of completions, columns by name, and the place of an answer in a text."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from lightning_rl.rewards import MathMatch, NumberMatch, text_of
from lightning_rl.rewards.text import first_line, stated_answer


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
            "last",
            id="the-last-answer",
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
    ("text", "stated"),
    [
        ("", None),
        ("no marker", None),
        ("#### 4", "4"),
        ("####\n4\n5", "4\n5"),
        ("#### 4 and #### 5", "5"),
        ("#### 4 ####", ""),
        ("The Answer Is: 7.\nBye", "7.\nBye"),
        ("answer is42", "42"),
        ("#### 4, the answer isn't 5", "4, the answer isn't 5"),
        (r"\boxed{\frac{1}{2}} or so", r"\frac{1}{2}"),
        (r"\boxed{\left\{1\right.} or so", r"\left\{1\right."),
        (r"\boxed{1 + {2", ""),
        (r"#### 3 \boxed{1\}", ""),
        ("Answer (in cm): 4", "4"),
        ("Answer in cm: 4", "4"),
        ("**Answer**: 4", "4"),
        ("Answer\uff1a4", "4"),
        ("The answers are 3 and 4", "3 and 4"),
        ("The correct answer to the question is 4", "4"),
        ("The answer, in cm, is 4", "4"),
        ("Die Antwort lautet 4", "4"),
        ("Antwort : 4", "4"),
        ("Respuesta: 4", "4"),
        ("La respuesta correcta es 4", "4"),
        ("R\u00e9ponse : 4", "4"),
        ("Risposta: 4", "4"),
        ("Resposta: 4", "4"),
        ("\u041e\u0442\u0432\u0435\u0442 (\u0441\u043c): 4", "4"),
        ("\u7b54\u6848\uff1a4", "4"),
        ("\u7b54\u3048\u306f4", "4"),
        ("\uc815\ub2f5: 4", "4"),
    ],
)
def test_the_last_marker_begins_the_stated_answer(text: str, stated: str | None) -> None:
    assert stated_answer(text) == stated


def test_the_first_line_is_cut_after_200_characters() -> None:
    assert first_line("4 \n5") == "4"
    assert first_line("x" * 500) == "x" * 200


@pytest.mark.parametrize(
    "reference",
    [
        np.int64(4),
        np.float32(4),
        np.array(4),
        np.array([4, 5]),
        np.array(["4"], dtype=object),
        Decimal("4"),
        Fraction(4),
    ],
    ids=repr,
)
@pytest.mark.parametrize("reward", [NumberMatch(), MathMatch()], ids=["number", "math"])
def test_a_reference_may_be_a_number_or_an_array_of_numpy(reward: NumberMatch | MathMatch, reference: Any) -> None:
    assert reward(["?"], ["4"], answer=[reference]) == [1.0]
