"""MathMatch: the results of math-verify, from any thread and process, also if a process hangs, stops or dies."""

import json
import math
import os
import random
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


def test_no_reference_means_does_not_apply(reward: MathMatch) -> None:
    assert reward(["?"] * 2, ["4", "4"], answer=[None, "4"]) == [None, 1.0]


def test_a_reference_that_is_not_mathematics_fails_its_row(reward: MathMatch) -> None:
    with pytest.warns(UserWarning, match=r"cannot read 1 of its references.*expected a number or formula, got ''"):
        values = reward(["?"] * 2, ["4", "4"], answer=["", "4"])
    assert values[0] is not None and math.isnan(values[0]) and values[1] == 1.0


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
