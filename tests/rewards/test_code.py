"""Code: tests of inputs and outputs, and assertions, on programs out of completions."""

import json
import math
import subprocess
import sys
from typing import Any

import pytest
from kit.skips import need_sandbox

from lightning_rl.rewards import CodeTests, Sandbox, SandboxUnavailable, sandbox
from lightning_rl.rewards.answer_match import UnreadableReference
from lightning_rl.rewards.code import _read, code_of

DOUBLE = "Here:\n```python\nprint(2 * int(input()))\n```\nDone."
CASES = [{"input": "2", "output": "4"}, {"input": "3\n", "output": " 6 \n\n"}]
BOX = Sandbox(seconds=30.0)


def reward(**options: Any) -> CodeTests:
    need_sandbox()
    return CodeTests(sandbox=BOX, **options)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("no code", None),
        ("```python\na\n```\nthen\n```python\nb = 1\nc\n```", "b = 1\nc"),
        ("```py\na\n```\noutput:\n```\n4\n```", "a"),
        ("```\na\n```", "a"),
        ("```python\nunfinished", "unfinished"),
    ],
)
def test_the_last_block_of_python_is_taken(text: str, code: str | None) -> None:
    assert code_of(text) == code


def test_the_share_of_tests_that_pass() -> None:
    wrong = DOUBLE.replace("2 *", "4 +").replace("4 +", "1 + ")  # right for no case
    half = DOUBLE.replace("2 * int(input())", "4")
    chat = [{"role": "assistant", "content": DOUBLE}]
    completions = [DOUBLE, half, wrong, "no code", chat, DOUBLE]
    tests = [CASES, CASES, CASES, CASES, CASES, None]
    assert reward()([""] * 6, completions, tests=tests) == [1.0, 0.5, 0.0, 0.0, 1.0, None]
    assert reward(partial=False)([""] * 2, completions[:2], tests=tests[:2]) == [1.0, 0.0]


def test_assertions_run_after_the_program_and_an_early_end_passes_none() -> None:
    tests = [["assert f(2) == 4", "assert f(3) == 9"]]
    programs = [
        "def f(x): return x * x",
        "def f(x): return 2 * x",
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "f(",
    ]
    values = [reward()([""], [f"```python\n{program}\n```"], tests=tests) for program in programs]
    assert values == [[1.0], [0.5], [0.0], [0.0], [0.0]]


def test_another_column_and_what_is_no_test() -> None:
    assert reward(tests="cases")([""], [DOUBLE], cases=[CASES]) == [1.0]
    with pytest.raises(
        ValueError, match=r"expected a column 'tests' for CodeTests\(tests='tests'\), got the columns \['cases'\]"
    ):
        reward()([""], [DOUBLE], cases=[CASES])
    logged: dict[str, Any] = {}
    with pytest.warns(UserWarning, match='expected a test to be code or a mapping with strings "input" .* got 3'):
        values = reward()(["", ""], [DOUBLE, DOUBLE], tests=[[3], CASES], log_extra=logged.__setitem__)
    assert "got 3" in logged["reason"][0] and logged["reason"][1] is None
    assert math.isnan(values[0] or 0) and values[1] == 1.0, "a bad row costs no other"


def test_a_machine_without_bubblewrap_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match='got no "bwrap"'):
        CodeTests(sandbox=Sandbox(seconds=21.0))


HUMAN_EVAL = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == 4\n"
ONE = {"input": "2", "output": "4"}


@pytest.mark.parametrize(
    ("tests", "read"),
    [
        (None, []),
        ([], []),
        ([ONE, "assert f(2) == 4"], [ONE, "assert f(2) == 4"]),
        (ONE, [ONE]),
        ("assert f(2) == 4", ["assert f(2) == 4"]),
        ({"inputs": ["2", "3"], "outputs": ["4", "6"]}, [ONE, {"input": "3", "output": "6"}]),
        (json.dumps([ONE]), [ONE]),
        (json.dumps({"inputs": ["2"], "outputs": ["4"]}), [ONE]),
        (json.dumps(["assert f(2) == 4"]), ["assert f(2) == 4"]),
        (HUMAN_EVAL, [f"{HUMAN_EVAL}\ncheck(f)"]),
        (f"{HUMAN_EVAL}\ncheck(f)", [f"{HUMAN_EVAL}\ncheck(f)"]),
    ],
)
def test_the_forms_that_tests_have(tests: Any, read: Any) -> None:
    assert _read(tests, "f") == read


@pytest.mark.nightly
def test_an_invalid_escape_in_a_test_gives_no_warning() -> None:
    script = "from lightning_rl.rewards.code import _read; _read(r\"assert f('\\d') == 4\", 'f')"
    run = subprocess.run([sys.executable, "-W", "default", "-c", script], capture_output=True, text=True, check=True)
    assert "SyntaxWarning" not in run.stderr


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (5, "to be code or a mapping"),
        ([5], "to be code or a mapping"),
        ("", "definitions only"),
        ("import unittest\nclass TestF(unittest.TestCase):\n    pass", "definitions only"),
        (HUMAN_EVAL, "needs the column 'entry_point'"),
        ("assert f(2) =", "to be Python"),
        ("[1, 2]", "to be code or a mapping"),
        ({"a": 1}, "to be code or a mapping"),
        ({"input": ["2"], "output": "4"}, "to be code or a mapping"),
        ({"inputs": ["2"], "outputs": []}, 'as many "inputs" as "outputs"'),
        ({"inputs": "2", "outputs": "4"}, 'as many "inputs" as "outputs"'),
        ({"inputs": [[2]], "outputs": [4], "fn_name": "f"}, 'without "fn_name"'),
        ({"inputs": [[2]], "outputs": ["4"]}, "to be code or a mapping"),
    ],
)
def test_what_is_no_test_is_none(tests: Any, message: str) -> None:
    found = _read(tests, None)
    assert isinstance(found, UnreadableReference) and message in str(found)
