"""NumberMatch: how numbers read, which one a completion states, and that nothing is rounded."""

import json
import math
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.rewards import NumberMatch
from lightning_rl.rewards.number_match import NUMBER, value_of
from lightning_rl.rewards.text import plain_text

BUNDLED = Path(__file__).resolve().parents[2] / "recipes" / "data" / "gsm8k"
F = Fraction


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", []),
        ("none", []),
        ("42", [42]),
        ("42.", [42]),
        ("42.0", [42]),
        ("007", [7]),
        (".5", [F(1, 2)]),
        ("0.1", [F(1, 10)]),
        ("-5", [-5]),
        ("+5", [5]),
        ("\u22127", [-7]),
        ("16-3", [16, 3]),
        ("16 - 3", [16, 3]),
        ("x-3", [3]),
        ("x=-3", [-3]),
        ("0,111", [F(111, 1000)]),
        ("x=0,5", [F(1, 2)]),
        ("-0{,}25", [F(-1, 4)]),
        ("(0,1)", [0, 1]),
        ("0,1,2", [0, 1, 2]),
        ("0, 5", [0, 5]),
        ("1,234,567.89", [F(123456789, 100)]),
        ("1{,}234", [1234]),
        (r"1,\!234", [1234]),
        (r"1\,234", [1234]),
        ("1\u202f234", [1234]),
        ("1,2,3", [1, 2, 3]),
        ("12,34", [12, 34]),
        ("1,2345", [1, 2345]),
        ("1,234,56", [1234, 56]),
        ("1,234, 5", [1234, 5]),
        ("$18", [18]),
        (r"\$18", [18]),
        ("-$5", [-5]),
        ("$-5", [-5]),
        ("\u20ac 5.50", [F(11, 2)]),
        ("Rs.500", [500]),
        ("5kg", [5]),
        ("50 m^2", [50]),
        ("50 m\u00b2", [50]),
        ("x_{2}", []),
        ("x2 and H2O", []),
        ("50%", [50]),
        (r"50\%", [50]),
        ("3/4", [F(3, 4)]),
        ("3 / 4", [F(3, 4)]),
        ("1.5/2", [F(3, 4)]),
        ("3/0", [None]),
        ("3/4/2024", [3, 4, 2024]),
        (r"\frac{3}{4}", [F(3, 4)]),
        (r"\dfrac{ 3 }{ 4 }", [F(3, 4)]),
        (r"\frac34", [F(3, 4)]),
        (r"-\frac{3}{4}", [F(-3, 4)]),
        (r"\frac{3}{0}", [None]),
        ("1 3/4", [F(7, 4)]),
        ("-1 3/4", [F(-7, 4)]),
        (r"1\frac{3}{4}", [F(7, 4)]),
        ("3\u00bd", [F(7, 2)]),
        ("\u00be", [F(3, 4)]),
        ("\uff14\uff12", [42]),
        ("\u0664\u0662", [42]),
        ("1e3", [1000]),
        ("1.5E-1", [F(3, 20)]),
        (r"1.5 \times 10^{3}", [1500]),
        ("2 x 10^3", [2000]),
        ("10^3", [1000]),
        ("2**10", [1024]),
        ("10\u207b\u00b3", [F(1, 1000)]),
        ("5\u00b2", [25]),
        ("0^-1", [None]),
        ("1e999999999", [None]),
        ("1e-999999999", [None]),
        ("10^999999999", [None]),
        ("9" * 1001, [None]),
        ("1.2.3", [F(6, 5), 3]),
        ("\u517142\u4e2a", [42]),
        ("**42**", [42]),
        ("4\x002", [4, 2]),
        ("nan inf Infinity", []),
    ],
)
def test_what_reads_as_a_number(text: str, numbers: list[Any]) -> None:
    assert [value_of(number) for number in NUMBER.finditer(plain_text(text))] == numbers


@pytest.mark.parametrize(
    ("options", "completion", "value"),
    [
        pytest.param({}, "6 * 7 = 42", 1.0, id="last-number"),
        pytest.param({}, "42, not 43", 0.0, id="only-the-last"),
        pytest.param({}, "#### 42\nI checked it 3 times.", 1.0, id="marker-beats-last"),
        pytest.param({}, "#### 41\n#### 42", 1.0, id="last-marker"),
        pytest.param({}, "#### 42 of 43", 1.0, id="first-behind-the-marker"),
        pytest.param({}, "#### 1 2 3 42", 0.0, id="no-list-of-guesses"),
        pytest.param({}, r"\boxed{42} out of 50", 1.0, id="boxed"),
        pytest.param({}, r"\boxed{x = 42}", 1.0, id="boxed-equation"),
        pytest.param({}, r"\boxed{\frac{84}{2}}", 1.0, id="boxed-fraction"),
        pytest.param({}, r"\boxed{42 \text{ apples}}", 1.0, id="boxed-unit"),
        pytest.param({}, "The answer is 6*7 = 42.", 1.0, id="behind-the-formula"),
        pytest.param({}, "The answer is 42, because x = 6.", 1.0, id="but-not-behind-words"),
        pytest.param({}, "The answer is correct: it is 42", 1.0, id="words-between"),
        pytest.param({}, "The answer is clear.\nIt is 42", 1.0, id="marker-without-number"),
        pytest.param({}, "The ANSWER IS: **$42.00**", 1.0, id="case-and-markdown"),
        pytest.param({"strict": True}, "It is 42", 0.0, id="strict-without-marker"),
        pytest.param({"strict": True}, "#### 42", 1.0, id="strict-with-marker"),
        pytest.param({"markers": ("=>",)}, "=> 42 #### 41", 1.0, id="other-markers"),
        pytest.param({"markers": ()}, "#### 42 43", 0.0, id="no-markers"),
        pytest.param({}, "42.0001", 0.0, id="nothing-is-rounded"),
        pytest.param({"rel_tol": 0.25}, "52.5", 1.0, id="relative-tolerance"),
        pytest.param({"rel_tol": 0.25}, "52.6", 0.0, id="beyond-relative-tolerance"),
        pytest.param({"abs_tol": 0.5}, "42.5", 1.0, id="absolute-tolerance"),
        pytest.param({"abs_tol": 0.5, "rel_tol": 0.001}, "42.6", 0.0, id="beyond-both-tolerances"),
        pytest.param({"after": "</think>"}, "42</think> 43", 0.0, id="number-in-the-thought"),
        pytest.param({"after": "</think>"}, "41</think> 42", 1.0, id="number-after-the-thought"),
        pytest.param({"tag": "answer"}, "41 <answer>42</answer> 43", 1.0, id="number-in-a-tag"),
        pytest.param({"tag": "answer"}, "42", 0.0, id="no-tag"),
        pytest.param({}, r"\fbox{42} 43", 1.0, id="fbox"),
        pytest.param({}, r"\boxed{42\sqrt{2}}", 0.0, id="surd"),
        pytest.param({}, r"\boxed{\sqrt{42}}", 0.0, id="root"),
        pytest.param({}, r"\boxed{\sqrt[3]{42}}", 0.0, id="cube-root"),
        pytest.param({}, r"\boxed{42\pi}", 0.0, id="multiple-of-pi"),
        pytest.param({}, "answer: 42:30", 0.0, id="time"),
        pytest.param({}, "answer: 10:42", 0.0, id="other-time"),
        pytest.param({}, "answer: 42-50", 0.0, id="range"),
        pytest.param({}, "The answer is 42 + 1", 0.0, id="sum"),
        pytest.param({}, r"\boxed{x + 42}", 0.0, id="polynomial"),
        pytest.param({}, r"\boxed{42^\circ}", 1.0, id="degrees"),
        pytest.param({}, r"\boxed{42 \mathrm{cm}^2}", 1.0, id="square-unit"),
        pytest.param({}, "answer: 42 - because", 1.0, id="dash"),
        pytest.param({}, r"The answer is $\left(42\right)$", 1.0, id="brackets"),
        pytest.param({}, "answer: -42 or", 0.0, id="sign"),
        pytest.param({}, "42%", 1.0, id="percent-is-a-unit"),
        pytest.param({}, r"\boxed{42", 0.0, id="unclosed-box"),
        pytest.param({}, r"#### 42 so \boxed{42", 0.0, id="unclosed-box-after-a-marker"),
        pytest.param({}, r"\boxed{\{42\}}", 1.0, id="escaped-braces"),
        pytest.param({}, r"\boxed{42\}", 0.0, id="escaped-brace-closes-nothing"),
        pytest.param({}, r"\boxed{" + " " * 300 + "42}", 1.0, id="long-box"),
        pytest.param({}, r"\boxed{x} with x = 42", 0.0, id="box-without-number"),
        pytest.param({}, "#### 42. Or not: the answer is unclear.", 0.0, id="number-before-the-last-marker"),
        pytest.param({}, "It is 42. The answer is clear.", 0.0, id="number-before-the-only-marker"),
        pytest.param({}, "#### 42 ####", 0.0, id="last-marker-without-text"),
        pytest.param({"strict": True}, "#### 42\nThe answer is right.", 0.0, id="strict-with-a-marker-without-number"),
        pytest.param({"markers": (r"\fbox{",)}, r"\fbox{42", 0.0, id="unclosed-box-of-another-name"),
    ],
)
def test_which_number_is_stated(options: dict[str, Any], completion: str, value: float) -> None:
    assert NumberMatch(**options)(["?"], [completion], answer=["42"]) == [value]


@pytest.mark.parametrize(
    ("reference", "number"),
    [
        (42, F(42)),
        (0.1, F(1, 10)),
        (F(1, 3), F(1, 3)),
        ("42", F(42)),
        ("$1,042.50 per month", F(2085, 2)),
        ("48/2 = <<48/2=24>>24 clips\n#### 72", F(72)),
        (r"so \boxed{-3}", F(-3)),
        (r"\boxed{42 \text{ cm}}", F(42)),
        ("x = 42", F(42)),
        (r"32,\!348", F(32348)),
        (r"1\,000", F(1000)),
        (r"\$32,\!348", F(32348)),
        (r"5\,\text{cm}", F(5)),
        (10**400, F(10**400)),
        ("The answer is clear.\nIt is 42", F(42)),
    ],
)
def test_what_reads_as_a_reference(reference: Any, number: Fraction) -> None:
    assert NumberMatch().number_of_reference(reference) == number


@pytest.mark.parametrize(
    "reference",
    [
        "x + 1",
        r"2\pi",
        "x^2",
        "5 or 6",
        "",
        True,
        math.nan,
        math.inf,
        [],
        ["x", "y"],
        "1e999999999",
        "#### 1 2",
        "5. The answer is x",
    ],
)
def test_a_reference_that_is_not_one_number_takes_its_row_out(reference: Any) -> None:
    with pytest.warns(UserWarning, match=r"expected a number, or a text with one number, got"):
        values = NumberMatch()(["?"] * 2, ["42", "42"], answer=[reference, 42])
    assert values[0] is not None and math.isnan(values[0]) and values[1] == 1.0


def test_one_of_several_references_is_enough() -> None:
    assert NumberMatch()(["?"] * 3, ["4", "5", "6"], answer=[[4, "5"], ("x", 5), [4, 5]]) == [1.0, 1.0, 0.0]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "piece",
    [
        "1",
        "1 ",
        "1,",
        ",000",
        "answer is ",
        r"\boxed{",
        "#",
        "=",
        r"\frac",
        r"\frac{ ",
        "1/",
        "1^",
        "1e",
        ".",
        "-",
        "$",
    ],
)
def test_time_grows_with_the_text_and_not_with_its_square(piece: str) -> None:
    text = (piece * 10**6)[: 10**6]
    begin = time.process_time()
    assert NumberMatch()(["?"], [text], answer=["7"]) == [0.0]
    assert time.process_time() - begin < 20  # about one second; a square would take hours


def rows(file: str) -> list[str]:
    return [json.loads(line)["answer"] for line in (BUNDLED / file).read_text(encoding="utf-8").splitlines()]


def test_bundled_gold_answers_score_1_and_others_0() -> None:
    answers = rows("train.jsonl") + rows("test.jsonl")
    assert len(answers) == 1200
    reward, prompts = NumberMatch(), [""] * len(answers)
    assert reward(prompts, answers, answer=answers) == [1.0] * len(answers)
    for change in (1, -1, F(1, 1000), 10**6):
        others = [f"#### {float(reward.number_of_reference(answer) + change)!r}" for answer in answers]
        assert reward(prompts, others, answer=answers) == [0.0] * len(answers)


@pytest.mark.parametrize(
    ("marker", "text"),
    [
        ("<answer>", "<answer>4</answer>\nI checked 5."),
        ('"answer":', '{"answer": 4, "other": 5}'),
        ("<result>", "<result>4</result>\nI checked 5."),
        ("**Answer**", "I checked 5.\n**Answer**\n4"),
    ],
)
def test_a_marker_may_be_a_tag_a_key_or_a_heading(marker: str, text: str) -> None:
    assert NumberMatch(markers=(marker,), strict=True)(["?"], [text], answer=[4]) == [1.0]
