"""ChoiceMatch by hand: letters with all that is written around them, indices, and texts of choices."""

import math
import time
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
        (r"The answer is \(B\).", "B"),
        ("Answer:\n\\[\n\\text{B}\n\\]", "B"),
        (r"Therefore \(B\) is right", "B"),
        ("Choice B seems right", "B"),
        ("B - a whale", "B"),
        ("\u3010\u7b54\u6848\u3011B\n\u3010\u89e3\u6790\u3011A\u9519\u8bef", "B"),
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
        ("D) No\n\nAnswer: B", "B"),
        ("The answer is therefore B.", "B"),
    ],
)
def test_letters(completion: str, chosen: str | None) -> None:
    values = [ChoiceMatch()(["?"], [completion], answer=[letter])[0] for letter in "ABCD"]
    assert values == [float(letter == chosen) for letter in "ABCD"]


SEVERAL_OR_NONE = (
    r"\boxed{A,B,C,D}",
    "Answer: A, B, C, D",
    r"\boxed{\text{A, B}}",
    r"\boxed{A \text{ or } B}",
    "Answer: (A), (B)",
    "Answer: A B",
    "A, B",
    "A and B",
    "(A) or (B)",
    "**A** or **B**",
    "A\nB\nC\nD",
    "A. B. C. D.",
    r"\boxed{A} or \boxed{B}",
    r"\boxed{A}, \boxed{B}",
    r"\boxed{\text{A}} \boxed{\text{B}}",
    "\\boxed{A}\n\n\\boxed{B}",
    r"\boxed{AB}",
    "Answer: ABCD",
    "Answer: A|B",
    "Answer: A; B",
    "Answer: A + B",
    "Answer: A, or B",
    "Answer: A and/or B",
    "Answer: either A or B",
    "Answer: both A and B",
    "Answer: A, B, or C",
    "Answer: A-D",
    "Answer: A to D",
    "\u7b54\u6848\u662fA\u6216B",
    "\u7b54\u6848\uff1aA\u3001B",
    "\u9009A\u548cB",
    "Antwort: A oder B",  # codespell:ignore oder
    "R\xe9ponse : A ou B",
    "La respuesta es A o B",
    "Answer: A (or B)",
    "Answer: A? B?",
    "Answer: A, maybe B",
    "A is correct and B is correct.",
    "The answer is A or the answer is B.",
    "I choose A or B.",
    "The correct options are A and B.",
    "A and B are correct.",
    "A) 3 B) 4 C) 5 D) 6",
    "(A) 3 (B) 4 (C) 5 (D) 6",
    "A. 3\nB. 4\nC. 5\nD. 6",
    "Answer: A dog is an animal",
    "A dog is an animal",
    "The answer is a whale",
    "B is not the answer",
    "B is wrong",
    "The answer is not B",
    "Option B is incorrect.",
    "It can't be B.",
    "Answer: not B",
    "neither A nor B",
    "Answer: none of the above",
    "Answer: all of the above",
    "Answer: I don't know",
    "The cow is bigger. A",
    "Answer: [A, B]",
    '{"answer": ["A", "B"]}',
    '{"answer": "A, B"}',
    "<answer>A, B</answer>",
    "<answer>A or B</answer>",
    r"Answer: A\quad B",
    r"\boxed{A \quad B}",
    r"\boxed{A\ B}",
    r"\boxed{\{A, B\}}",
    "Answer: A & B",
    "The answer is A/B",
    "The answer is A as well as B",
    "not only A but also B",
    "Answer: A, Answer: B",
    "A or B is correct",
    "Option A or option B is correct",
    "I would choose A and B",
    "The answer could be A or B",
    "The options are A, B, C and D.",
)
CHOSEN = {
    "B": (
        "The correct option is B.",
        "The best choice is B.",
        "Option B is correct.",
        "B is the answer.",
        "The answer is not A but B.",
        "I would choose option B because A is wrong.",
        "The answer is likely B",
        "The answer is the letter B.",
        "<answer>B</answer>",
        '{"answer": "B"}',
        r"\boxed{\rm B}",
        "Answer: 'B'",
        "\u9009B",
        "\u7b54\u6848\u9009B\u3002",
        "\u56e0\u6b64\uff0c\u6b63\u786e\u9009\u9879\u662fB\u3002",
        "\u5e94\u9009B",
        "\u7b54\u6848\u662f\u9009\u9879B",
        "Die Antwort lautet B.",
        "R\xe9ponse : B",
        "La r\xe9ponse correcte est B.",
        "Respuesta: B",
        "La respuesta correcta es B.",
        "Resposta: B",
        "A resposta correta \xe9 B.",
        "\u7b54\u3048\u306fB\u3067\u3059",
        "\uc815\ub2f5: B",
        "Option B",
        "Answer B",
        "Final answer: B",
        "B is the best answer",
        "B is the correct choice",
        "B is the most appropriate.",
        "(B) is correct",
        "**B** is correct.",
        "The correct choice would be B.",
        "The right answer must be (B).",
        "I pick B.",
        "I'd go with B",
        "So it's B.",
        "So B.",
        "Therefore, B.",
        "blah blah.\n\nB",
        "blah blah.\n**B**",
        "Because of x.\nOption B",
        "The answer is B rather than A",
        "The answer is B, not A.",
        "The answer is B and not A.",
        "Not A. B.",
        "The answer isn't A, it's B",
        "The answer is definitely B.",
        "The answer is most probably B",
        "My final choice: B",
        "Choice: B",
        "Option: B",
        "The answer is:\n\nB",
        'The answer is "B".',
        "Answer: \u201cB\u201d",
        "Answer: `B`",
        "Answer: [B]",
        "Answer: $B$",
        r"\boxed{\textbf{B}}",
        r"\boxed{\text{Option B}}",
        r"\boxed{\text{(B)}}",
        r"\boxed{B.}",
        r"\boxed{B) 36}",
        r"\boxed{b}",
        r"\boxed{\mathrm{~B}}",
        r"\boxed{\bf B}",
        r"\boxed{\mathbf{B}}",
        r"\boxed{Option B}",
        r"\boxed{B: a whale}",
        '{"choice": "B"}',
        "{'answer': 'B'}",
        "answer = B",
        "The answer is option (B), since (A) is wrong.",
        "A is wrong. C is wrong. B is right.",
        "Die richtige Antwort ist B.",  # codespell:ignore ist
        "Richtig ist B.",  # codespell:ignore ist
        "Antwort B ist richtig.",  # codespell:ignore ist
        "Die L\xf6sung ist B.",  # codespell:ignore ist
        "L'option B est correcte.",
        "La bonne r\xe9ponse est B",
        "La bonne r\xe9ponse est la lettre B",
        "La opci\xf3n correcta es B",
        "La opci\xf3n B es correcta",
        "A alternativa correta \xe9 B",
        "A op\xe7\xe3o correta \xe9 a B",
        "La risposta corretta \xe8 B",
        "Risposta: B",
        "\u041e\u0442\u0432\u0435\u0442: B",
        "\u041f\u0440\u0430\u0432\u0438\u043b\u044c\u043d\u044b\u0439 \u043e\u0442\u0432\u0435\u0442: B",
        "\u041f\u0440\u0430\u0432\u0438\u043b\u044c\u043d\u044b\u0439 \u043e\u0442\u0432\u0435\u0442 B",
        "\u6b63\u89e3\u306fB\u3067\u3059",
        "\u6b63\u89e3\u306fB",
        "\u7b54\u3048\uff1aB",
        "\u9078\u629e\u80a2B\u304c\u6b63\u89e3\u3067\u3059",
        "B\u304c\u6b63\u89e3\u3067\u3059",
        "\uc815\ub2f5\uc740 B\uc785\ub2c8\ub2e4",
        "\uc815\ub2f5\uc740 B",
        "\ub2f5: B",
        "\uc815\ub2f5\uc740 B\ubc88\uc785\ub2c8\ub2e4",
        "\u7b54\u6848\uff1aB",
        "\u7b54\u6848\u5e94\u8be5\u662fB",
        "\u7b54\u6848\u5c31\u662fB",
        "\u6b63\u786e\u7b54\u6848\u662fB",
        "\u6b63\u786e\u7b54\u6848\u4e3a B",
        "\u9009\u9879B\u662f\u6b63\u786e\u7684",
        "B\u9009\u9879\u6b63\u786e",
        "B\u662f\u6b63\u786e\u7684",
        "\u6545\u9009B",
        "\u6211\u9009\u62e9B",
        "\u9009\u62e9B",
        "\u6240\u4ee5\u9009\uff08B\uff09",
        "\u6240\u4ee5\u7b54\u6848\u662f **B**\u3002",
        "\u4e0d\u9009A\uff0c\u9009B",
        "\u7b54\u6848\u4e0d\u662fA\uff0c\u800c\u662fB",
        "A dog? No. Answer: B",
        "Is it (A) or (C)? I take (B)",
        "The answer is B. A is wrong",
        "Answer: B (not A)",
        "Answer: B (A is wrong)",
        "Answer: B, since A, C and D are wrong.",
        "Answer: A\nNo, wait. The correct option is B.",
        "The correct option is A. Wait, actually the correct option is B.",
        "\u24b7",
        "\uff22",
        "\u7b54\u6848\uff1a\uff22",
        "Answer: B B",
        r"\boxed{B} \boxed{B}",
        "So the answer is B: B is big.",
        "The answer is B, which is between A and C.",
        "I eliminate A and C. B",
        "Rule out A, C. The answer is B",
        "Answer: B. a whale",
        "Answer: B - a whale",
        "Answer: B \u2013 a whale",
        "Answer: B a whale",
        "The answer is B a whale",
        "<b>B</b>",
        "Answer: <b>B</b>",
        "#### B",
        "####B",
        "#### Option B",
        "The answer is **(B) a whale**.",
        "correct answer: B",
        "Correct option: B",
        "The correct letter is B",
        "B.\n\nExplanation: A is a dog, C is a cow.",
        "B\nBecause A is too small.",
        "B because A is small",
        "B, because A is small",
        r"\text{B}",
        "$B$",
        "(B)",
        "The correct statement is B.",
        "The one that is right is option B.",
        "The solution is B",
        "The best answer here is B.",
        "Answer:B",
        "ANSWER - B",
        "Answer is B",
        "The answer must be B.",
        "The answer should be B",
        "The answer would be B.",
        "The answer, therefore, is B.",
        "Thus, the final answer is (B).",
        "I believe the answer is B",
        "The answer is B because it is true that A is smaller.",
        "B is the answer because it is small",
    ),
    "A": (
        "The answer is A because it is big",
        "Answer: A because it is big",
        "Answer: A is correct",
        "A is correct",
        "Answer: A",
        "The answer is A.",
        "Answer: A. dog",
        "Answer: A) dog",
        "Answer: A Dog",
        "The answer is A, a dog is big",
        "A",
        "a",
        "option a",
        "The answer is option a because",
        "I choose A as it fits",
        "Answer: A. A dog is big",
        r"\boxed{A}. A dog",
        "A. A dog is big",
        "A dog is big, so A.",
        "Answer: A, because B is wrong",
        "Answer: A since B is not",
        "A\n\nA dog is big",
    ),
}


@pytest.mark.parametrize("completion", SEVERAL_OR_NONE)
def test_several_letters_articles_and_letters_that_are_ruled_out_are_no_choice(completion: str) -> None:
    assert len(ChoiceMatch().letters_of_text(completion)) != 1


@pytest.mark.parametrize(("letter", "completion"), [(letter, said) for letter in "AB" for said in CHOSEN[letter]])
def test_sentences_state_a_choice(letter: str, completion: str) -> None:
    assert ChoiceMatch().letters_of_text(completion) == {"AB".index(letter)}


@pytest.mark.parametrize(
    "part", ["A, ", r"\boxed{A}", "A is ", "answer ", "option ", "not ", "so ", "\n", " ", "(", "it is A. "]
)
def test_long_texts_are_read_fast(part: str) -> None:
    begin = time.process_time()
    ChoiceMatch().letters_of_text(part * 4000)
    assert time.process_time() - begin < 5


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
        (r"\boxed{\text{a whale}}", 1),
        (r"\boxed{\textbf{a whale}}", 1),
        ("Answer: a whale or an ant", None),
        ("Answer: a whale, an ant", None),
        (r"\boxed{\text{a whale and a whale shark}}", None),
        ("Answer: a whale, since an ant is small", 1),
        ("something else", None),
    ],
)
def test_texts_of_choices(completion: str, index: int | None) -> None:
    reward = ChoiceMatch(choices="options")
    values = [reward(["?"], [completion], answer=[row], options=[ANIMALS])[0] for row in range(4)]
    assert values == [float(row == index) for row in range(4)]


@pytest.mark.parametrize(
    ("completion", "value"),
    [(text, 1.0) for text in ("20", "20.", "20 km", r"\boxed{20}", "$20$")]
    + [(text, 0.0) for text in ("20 or 30", r"\boxed{20, 30}", "20.5", "20%", r"20\%", "20/3", "20, " * 10**4 + "30")],
)
def test_a_number_that_is_a_choice_is_no_part_of_another_number(completion: str, value: float) -> None:
    reward = ChoiceMatch(choices="options")
    assert reward(["?"], [f"Answer: {completion}"], answer=["B"], options=[["10", "20", "30"]]) == [value]


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


@pytest.mark.parametrize("reference", ["ACD", "A, C, D", "(A), (C) and (D)"])
def test_several_right_letters_have_to_be_chosen_together(reference: str) -> None:
    chosen = [
        "The correct answers are A, C and D.",
        r"\boxed{ACD}",
        "A, C, D",
        "\u7b54\u6848\u662fACD",
        "Answer: D, C, A",
    ]
    others = ["A and C", "Answer: ABCD", "D", r"\boxed{A, C}"]
    values = ChoiceMatch()(["?"] * 9, chosen + others, answer=[reference] * 9)
    assert values == [1.0] * 5 + [0.0] * 4
