"""MathMatch: the results of math-verify, from any thread and process, also if a process hangs, stops or dies."""

import itertools
import json
import math
import os
import random
import runpy
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from kit.marks import wait_for

from lightning_rl.rewards import MathMatch

ROOT = Path(__file__).resolve().parents[2]
HANG = r"\boxed{9^{9^{9^{9^{9}}}}}"


@pytest.fixture(scope="module")
def reward() -> MathMatch:
    return MathMatch()


@pytest.mark.parametrize(
    ("completion", "reference", "value"),
    [
        ("It is 42.", "42", 1.0),
        ("It is 42.", 42, 1.0),
        ("It is 43.", "42", 0.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"so $x + 1$", "1 + x", 1.0),
        (r"so $x + 1$", "$1 + x$", 1.0),
        (r"so $x + 2$", "1 + x", 0.0),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0),
        (r"\boxed{(x+1)^2}", "x^2 + 2x + 1", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        (r"\boxed{(1, 2)}", "(2, 1)", 0.0),
        ("#### $1,450,000", "1,450,000", 1.0),
        ("#### 1,450,001", "1450000", 0.0),
        ("#### -5", "-5", 1.0),
        ("#### x^2", "x \\cdot x", 1.0),
        ("3 clips\n#### 72", "48 + 24 = 72 clips\n#### 72", 1.0),
        ("", "42", 0.0),
        ("####", "42", 0.0),
        ("\0", "42", 0.0),
        ("nothing", "42", 0.0),
        (r"\boxed{\frac{1}{0}}", "42", 0.0),
        (r"\boxed{" * 2000, "42", 0.0),
        ("(" * 10**6, "42", 0.0),
        ("1e999999999", "42", 0.0),
        (r"\boxed{1e999999999}", "42", 0.0),
        ("\u0664\u0662\ud800", "7", 0.0),
    ],
)
def test_table(reward: MathMatch, completion: str, reference: Any, value: float) -> None:
    assert reward(["?"], [completion], answer=[reference]) == [value]


@pytest.mark.parametrize(
    ("completion", "reference", "value"),
    [
        pytest.param(r"\boxed{(1,2)}", "(1,\n2)", 1.0, id="line-break"),
        pytest.param(r"\boxed{2}", "(1,\n2)", 0.0, id="not-the-last-line-alone"),
        pytest.param(r"\boxed{\sqrt{2}}", "#### \\sqrt{2}\nDone.", 1.0, id="first-line-after-the-marker"),
        pytest.param(
            r"$\boxed{\begin{pmatrix}1\\2\end{pmatrix}}$",
            "\\begin{pmatrix}\n1\\\\\n2\n\\end{pmatrix}",
            1.0,
            id="matrix",
        ),
        pytest.param(r"\boxed{18.90}", r"\$18.90", 1.0, id="escaped-dollar"),
        pytest.param(r"\boxed{\$18.90}", "$18.90", 1.0, id="dollar"),
        pytest.param(r"\boxed{32348}", r"\$32,\!348", 1.0, id="negative-space"),
        pytest.param("#### 0,111", "0.111", 1.0, id="leading-zero"),
        pytest.param(r"\boxed{111}", "0,111", 0.0, id="leading-zero-is-no-thousand"),
        pytest.param("#### 0,5", "0.5", 1.0, id="decimal-comma"),
        pytest.param(r"\boxed{(0,5)}", "(0,5)", 1.0, id="pair"),
        pytest.param(r"\boxed{0.5}", "(0,5)", 0.0, id="pair-is-no-decimal"),
        pytest.param(r"So \boxed{3}. Wait, ... \boxed{4}.", "4", 1.0, id="last-box"),
        pytest.param(r"So \boxed{3}. Wait, \boxed{4}.", "3", 0.0, id="not-the-first-box"),
        pytest.param(r"So \boxed{3}, \boxed{4}.", "3, 4", 0.0, id="boxes-are-not-joined"),
        pytest.param(r"\fbox{4}", "4", 1.0, id="fbox"),
        pytest.param(r"\boxed 7", "7", 1.0, id="box-of-a-token"),
        pytest.param(r"\boxed{5} so \boxed{6", "5", 0.0, id="unclosed-box"),
        pytest.param(r"\boxed{5}. I hope the answer is right.", "5", 1.0, id="symbols-beat-words"),
        pytest.param(r"The answer is \sqrt{2}.", r"\sqrt{2}", 1.0, id="sentence"),
        pytest.param("The answer is then 5", "5", 1.0, id="words-between"),
        pytest.param(r"\boxed{1.6 \times 10^{-19}}", r"6.6 \times 10^{-34}", 0.0, id="small"),
        pytest.param(r"\boxed{0.0}", r"1.6 \times 10^{-19}", 0.0, id="small-is-not-0"),
        pytest.param(r"\boxed{1.6e-19}", r"1.6 \times 10^{-19}", 1.0, id="small-and-equal"),
        pytest.param(r"\boxed{1.6e-19}", 1.6e-19, 1.0, id="small-float"),
        pytest.param(r"\boxed{(1, 10^{-19})}", r"(1, 2 \cdot 10^{-19})", 0.0, id="small-in-a-pair"),
        pytest.param("\\boxed{1/20!}", "1/25!", 0.0, id="small-fraction"),
        pytest.param("\\boxed{1/25!}", "1/25!", 1.0, id="same-small-fraction"),
        pytest.param(r"\boxed{10^{-400}}", r"10^{-401}", 0.0, id="smaller-than-a-float"),
        pytest.param(r"\boxed{0.333333}", "1/3", 1.0, id="six-decimals"),
        pytest.param(r"\boxed{.00012341}", ".0001234", 1.0, id="four-digits"),
        pytest.param(r"\boxed{.0001236}", ".0001234", 0.0, id="not-three-digits"),
        pytest.param(r"\boxed{101_2}", "101_3", 0.0, id="base"),
        pytest.param(r"\boxed{101_{2}}", "101_2", 1.0, id="same-base"),
        pytest.param(r"\boxed{101}", "101_2", 1.0, id="no-base"),
        pytest.param(r"\boxed{5 \mod 7}", r"5 \mod 8", 0.0, id="modulus"),
        pytest.param(r"\boxed{5 \pmod{7}}", r"5 \mod 7", 1.0, id="same-modulus"),
        pytest.param(r"\boxed{5}", "5 ft", 1.0, id="no-unit"),
        pytest.param(r"\boxed{5 \text{ feet}}", "5 ft", 1.0, id="other-name-of-the-unit"),
        pytest.param(r"\boxed{5 \text{ hours}}", "5 minutes", 0.0, id="unit"),
        pytest.param("The answer is 5 hours.", r"5\text{ minutes}", 0.0, id="unit-in-a-sentence"),
        pytest.param("5 hours", "5 minutes", 0.0, id="unit-alone"),
        pytest.param(r"\boxed{60 \text{ mph}}", "60 miles per hour", 1.0, id="speed"),
        pytest.param(r"\boxed{12\text{ cm}^2}", r"12 \text{ square centimeters}", 1.0, id="area"),
        pytest.param(r"\boxed{12\text{ cm}^3}", r"12 \text{ square centimeters}", 0.0, id="volume"),
        pytest.param(r"\boxed{5 \text{ boys}}", "5 children", 1.0, id="unknown-units"),
        pytest.param(r"\boxed{5000000}", "5 million", 1.0, id="million"),
        pytest.param(r"\boxed{5 \text{ billion}}", "5 million", 0.0, id="billion"),
        pytest.param(r"\boxed{5x}", "5x", 1.0, id="variable-is-no-unit"),
        pytest.param(r"\boxed{5}", "5x", 0.0, id="variable-is-not-dropped"),
        pytest.param(r"\boxed{\text{Friday}}", "Friday", 1.0, id="words"),
        pytest.param("The answer is friday.", r"\text{Friday}", 1.0, id="words-in-a-sentence"),
        pytest.param(r"\boxed{Sunday}", "Friday", 0.0, id="other-words"),
        pytest.param(r"\boxed{yrdiaF}", "Friday", 0.0, id="words-are-no-products"),
        pytest.param(r"\boxed{\text{June } 5}", "June 5", 1.0, id="words-and-numbers"),
        pytest.param(r"\boxed{2\text{ or }1}", "1 and 2", 1.0, id="conjunction"),
        pytest.param(r"\boxed{4}", ["5", "4"], 1.0, id="several-references"),
        pytest.param(r"\boxed{4}", ["n/a", "4"], 1.0, id="one-readable-reference"),
        pytest.param(r"\boxed{3}", ["5", "4"], 0.0, id="none-of-several-references"),
    ],
)
def test_which_answer_counts_and_what_is_compared(
    reward: MathMatch, completion: str, reference: Any, value: float
) -> None:
    assert reward(["?"], [completion], answer=[reference]) == [value]


@pytest.mark.parametrize("reference", ["", "forty two", "Twenty-one", "n/a", math.nan, math.inf, True, [], ["n/a", ""]])
def test_a_reference_without_a_value_fails_its_row(reward: MathMatch, reference: Any) -> None:
    with pytest.warns(UserWarning, match=r"cannot read 1 of its references"):
        values = reward(["?"] * 2, ["4", "4"], answer=[reference, "4"])
    assert values[0] is not None and math.isnan(values[0]) and values[1] == 1.0


def test_only_the_text_after_the_thought_or_in_a_tag_counts() -> None:
    thought, tagged = MathMatch(after="</think>"), MathMatch(tag="answer")
    completions = [r"\boxed{4}</think>", r"\boxed{3}</think> It is \boxed{4}.", r"\boxed{4}"]
    assert thought(["?"] * 3, completions, answer=["4"] * 3) == [0.0, 1.0, 0.0]
    formulas = [r"\sqrt{3}", "x+1", "(0,1)", r"2\pi", "1,2", "3+4i", "A", "It is 5", "5 hours"]
    wanted = [*formulas[:-2], "5", "5 minutes"]
    values = [1.0] * 8 + [0.0]
    assert tagged(["?"] * 9, [f"no <answer>{one}</answer>" for one in formulas], answer=wanted) == values
    assert thought(["?"] * 9, [f"no</think>\n{one}" for one in formulas], answer=wanted) == values
    completions = ["4 <answer>3</answer>", "3 <answer> 4 </answer> 5", "4", "<answer>4"]
    assert tagged(["?"] * 4, completions, answer=["4"] * 4) == [0.0, 1.0, 0.0, 0.0]


def test_no_reference_means_does_not_apply(reward: MathMatch) -> None:
    assert reward(["?"] * 2, ["4", "4"], answer=[None, "4"]) == [None, 1.0]


def test_a_formula_that_hangs_scores_0_and_the_others_are_compared() -> None:
    reward = MathMatch(timeout=1.0, processes=1)
    assert reward(["?"], ["x4"], answer=["$4x$"]) == [0.0]  # starts the process
    begin = time.monotonic()
    completions = ["so $x+1$", HANG, "so $1+x$"]
    assert reward(["?"] * 3, completions, answer=["x+1"] * 3) == [1.0, 0.0, 1.0]
    assert time.monotonic() - begin < 60


def workers_of(reward: MathMatch) -> list[int]:
    """Return the ids of the processes, each after that of its guard, without that of the server."""
    return reward.pool.pids()[3::2]


def test_a_process_that_dies_fails_its_row_alone() -> None:
    reward = MathMatch(timeout=0.5, processes=1)
    formulas = ["so $x+1$"] * 2
    assert reward(["?"] * 2, formulas, answer=["1+x"] * 2) == [1.0, 1.0]
    (worker,) = workers_of(reward)
    os.kill(worker, signal.SIGKILL)
    values = reward(["?"] * 2, formulas, answer=["1+x"] * 2)
    assert values[1] == 1.0 and values[0] in (0.0, 1.0)  # killed before its question or during it
    assert workers_of(reward) != [worker]


@pytest.mark.nightly
def test_a_busy_machine_changes_no_score() -> None:
    reward = MathMatch(timeout=0.5, processes=1)
    assert reward(["?"], ["so $x+1$"], answer=["1+x"]) == [1.0]
    (worker,) = workers_of(reward)
    os.kill(worker, signal.SIGSTOP)
    threading.Timer(4.0, os.kill, (worker, signal.SIGCONT)).start()
    assert reward(["?"], ["so $x+2$"], answer=["2+x"]) == [1.0]
    assert workers_of(reward) == [worker]


def test_no_process_is_left_behind() -> None:
    reward = MathMatch(processes=1)
    reward(["?"], ["so $x$"], answer=["x+1"])
    pids = reward.pool.pids()
    del reward
    assert len(pids) == 4 and wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20.0)


def plain_number(draw: random.Random) -> str:
    digits = str(draw.randrange(10 ** draw.choice([1, 2, 3, 5, 9])))
    decimals = "".join(draw.choice("0001259") for _ in range(draw.choice([0, 0, 1, 2, 3, 6])))
    return draw.choice(["", "-"]) + digits + ("." + decimals if decimals else "")


def fractions(draw: random.Random) -> list[str]:
    """Return an integer, a fraction that may be equal to it, and the same fraction extended."""
    whole, bottom, factor = draw.randrange(-99, 999), draw.randrange(1, 20), draw.randrange(1, 9)
    top = whole * bottom + draw.choice([0, 0, 1])
    pairs = [(top, bottom), (top * factor, bottom * factor)]
    return [str(whole), *(rf"{'-' if over < 0 else ''}\frac{{{abs(over)}}}{{{under}}}" for over, under in pairs)]


@pytest.mark.nightly
def test_plain_numbers_are_compared_as_math_verify_compares_them() -> None:
    math_verify = pytest.importorskip("math_verify")
    draw = random.Random(0)
    pairs = [("1,000", "1000"), ("007", "7"), ("-0", "0"), ("1,000", "1,001"), ("1", "1.000001"), ("18", "18.00")]
    for _ in range(300):
        number = plain_number(draw)
        longer = number + ("0" if "." in number else ".0")
        pairs += [(number, other) for other in (plain_number(draw), number, longer[:16], number.removeprefix("-"))]
    pairs = [pair for pair in pairs if all(len(number.partition(".")[2]) <= 6 for number in pair)]
    pairs += [pair for _ in range(300) for pair in itertools.permutations(fractions(draw), 2)]
    reward = MathMatch()
    found = reward([""] * len(pairs), [f"#### {text}" for _, text in pairs], answer=[wanted for wanted, _ in pairs])
    assert reward.pool.pids() == []  # no process was asked
    parsed = [[math_verify.parse(f"${number}$") for number in pair] for pair in pairs]
    assert found == [float(math_verify.verify(*pair)) for pair in parsed]
    assert 300 < sum(value == 1.0 for value in found) < len(found) - 300


def test_bundled_gold_answers_score_1_and_others_0(reward: MathMatch) -> None:
    lines = (ROOT / "recipes" / "data" / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    numbers = [answer.rpartition("#### ")[2] for answer in answers]
    assert len(answers) == 200
    assert reward([""] * 200, answers, answer=answers) == [1.0] * 200
    boxed = [rf"So it is \boxed{{{number}}}." for number in numbers]
    assert reward([""] * 200, boxed, answer=answers) == [1.0] * 200
    for more in ("1", ".5"):
        others = [rf"So it is \boxed{{{number}{more}}}." for number in numbers]
        assert reward([""] * 200, others, answer=answers) == [0.0] * 200


def test_the_page_shows_what_the_rewards_give() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "answers.py"))
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    assert f"{script['BEGIN']}\n{script['tables']()}{script['END']}" in page, "run python docs/answers.py"
