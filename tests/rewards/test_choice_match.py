"""ChoiceMatch by hand: letters with all that is written around them, indices, and texts of choices."""

import math
from typing import Any

import pytest

from lightning_rl.rewards import ChoiceMatch

ANIMALS = ["a dog", "a whale", "a whale shark", "an ant"]


@pytest.mark.parametrize(
    ("completion", "chosen"),
    [
        ("B", "B"),
        ("b", "B"),
        (" (B). ", "B"),
        ("**B**", "B"),
        ("B.", "B"),
        ("B) a whale", "B"),
        ("(B) a whale, since ...", "B"),
        ("Answer: B", "B"),
        ("Answer: (B)", "B"),
        ("**Answer:** B", "B"),
        ("The answer is option B.", "B"),
        (r"\boxed{B}", "B"),
        (r"$\boxed{\text{B}}$", "B"),
        ("#### B", "B"),
        ("A is wrong, C too. The answer is B because A is small.", "B"),
        ("The answer is not obvious. So it is (B).", "B"),
        ("Is it (A) or (C)? I take (B)", "B"),
        ("Answer: A\nNo, wait. Answer: B", "B"),
        ("", None),
        ("A dog is no fish", None),
        ("Because", None),
        ("Answer: Because", None),
        ("Answer: E", None),
        ("E", None),
        ("\0", None),
        ("AB", None),
        ("First Answer: A. On reflection, the answer is b.", "B"),
        ("The answer is b because A is small.", "B"),
        ("answer: (b)", "B"),
        ("ANSWER: option a because", "A"),
        (r"\boxed{b}", "B"),
        (r"\boxed{\mathrm{B}}", "B"),
        (r"\boxed{\mathbf{(B)}}", "B"),
        (r"\fbox{\textbf{B}}", "B"),
        ("I choose B)36", "B"),
        ("The answer is A or B", None),
        ("Answer: (A) and (B)", None),
        (r"\boxed{A/B}", None),
        ("The answer is B, A is wrong", "B"),
        ("The answer is B and because", "B"),
        ("Not A) but B)", "B"),
        ("\u6240\u4ee5\u7b54\u6848\u662fB\u3002", "B"),
        ("\u7b54\u6848\uff1a\uff08B\uff09", "B"),
        ("\u6545\u9009\uff1aB", "B"),
        ("\u6545\u9009B\u9879", "B"),
        ("Die Antwort: B.", "B"),
        ("La r\u00e9ponse est (B)", "B"),
        ("La respuesta es B", "B"),
        ("#### b) a whale", "B"),
        ("The answer is clear: it is (b).", "B"),
        ("Answer: A\nNo. The answer is wrong.", None),
        ("Answer: A\nThe answer is", None),
        ("(A) is right, so the answer is not obvious.", None),
        ("Answer: A. No, the answer is not (C).", None),
        ("Answer: A. The answer isn't (C).", "A"),
        ("The answer is a dog", None),
        ("The answer is I think (b)", "B"),
        (r"\boxed{A", None),
        (r"Answer: B, so \boxed{A", None),
        (r"\boxed{\text{A}", None),
        (r"\boxed{A\}", None),
        (r"\boxed{A} or \boxed{B", None),
        (r"\boxed{none} of (A) and (B)", None),
    ],
)
def test_letters(completion: str, chosen: str | None) -> None:
    values = [ChoiceMatch()(["?"], [completion], answer=[letter])[0] for letter in "ABCD"]
    assert values == [float(letter == chosen) for letter in "ABCD"]


@pytest.mark.parametrize(
    ("completion", "index"),
    [
        ("a whale", 1),
        ("A Whale!", 1),
        ("The answer is a whale shark.", 2),
        ("The answer is a whale.", 1),
        ("Answer: a whales", None),
        ("Answer: D", 3),
        ("Answer: a whale. On reflection, the answer is an ant.", 3),
        ("Answer: a whale. No, the answer is a cow.", None),
        (r"\boxed{a whale", None),
        ("something else", None),
    ],
)
def test_texts_of_choices(completion: str, index: int | None) -> None:
    reward = ChoiceMatch(choices="options")
    values = [reward(["?"], [completion], answer=[row], options=[ANIMALS])[0] for row in range(4)]
    assert values == [float(row == index) for row in range(4)]


@pytest.mark.parametrize("reference", ["B", "b", "(B)", 1, "a whale", "B)36", "(B) 36", "B. 36", [1, 3], ["B"]])
def test_a_reference_is_a_letter_an_index_or_a_text(reference: Any) -> None:
    reward = ChoiceMatch(choices="options")
    assert reward(["?"] * 2, ["B", "C"], answer=[reference] * 2, options=[ANIMALS] * 2) == [1.0, 0.0]


@pytest.mark.parametrize("reference", ["E", 4, -1, True, "a cow", None.__class__])
def test_a_reference_that_names_no_choice_takes_its_row_out(reference: Any) -> None:
    with pytest.warns(
        UserWarning, match=r"expected one of the letters 'ABCD', an index below 4, or \(with choices=\) the text"
    ):
        (value,) = ChoiceMatch()(["?"], ["B"], answer=[reference])
    assert value is not None and math.isnan(value)


@pytest.mark.parametrize("letters", ["", "A", "AA", "Aa"])
def test_letters_are_two_different_ones_or_more(letters: str) -> None:
    with pytest.raises(ValueError, match="expected letters to be two or more different letters"):
        ChoiceMatch(letters=letters)
