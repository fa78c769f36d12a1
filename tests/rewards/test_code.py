"""Code: tests of inputs and outputs, and assertions, on programs out of completions."""

from typing import Any

import pytest

from lightning_rl.rewards import CodeTests, Sandbox, SandboxUnavailable, sandbox
from lightning_rl.rewards.code import code_of

DOUBLE = "Here:\n```python\nprint(2 * int(input()))\n```\nDone."
CASES = [{"input": "2", "output": "4"}, {"input": "3\n", "output": " 6 \n\n"}]
BOX = Sandbox(seconds=30.0)


def reward(**options: Any) -> CodeTests:
    try:
        return CodeTests(sandbox=BOX, **options)
    except SandboxUnavailable as error:
        pytest.skip(str(error))


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


@pytest.mark.slow
def test_the_share_of_tests_that_pass() -> None:
    wrong = DOUBLE.replace("2 *", "4 +").replace("4 +", "1 + ")  # right for no case
    half = DOUBLE.replace("2 * int(input())", "4")
    chat = [{"role": "assistant", "content": DOUBLE}]
    completions = [DOUBLE, half, wrong, "no code", chat, DOUBLE]
    tests = [CASES, CASES, CASES, CASES, CASES, None]
    assert reward()([""] * 6, completions, tests=tests) == [1.0, 0.5, 0.0, 0.0, 1.0, None]
    assert reward(partial=False)([""] * 2, completions[:2], tests=tests[:2]) == [1.0, 0.0]


@pytest.mark.slow
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


@pytest.mark.slow
def test_another_column_and_what_is_no_test() -> None:
    assert reward(tests="cases")([""], [DOUBLE], cases=[CASES]) == [1.0]
    with pytest.raises(
        ValueError, match=r"expected a column 'tests' for CodeTests\(tests='tests'\), got the columns \['cases'\]"
    ):
        reward()([""], [DOUBLE], cases=[CASES])
    with pytest.raises(ValueError, match='expected a test to be code or a mapping with "input" and "output", got 3'):
        reward()([""], [DOUBLE], tests=[[3]])


def test_a_machine_without_namespaces_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_missing", lambda: "unshare: Operation not permitted")
    with pytest.raises(SandboxUnavailable, match="got unshare"):
        CodeTests()
    assert CodeTests(sandbox=Sandbox(unsafe=True)).partial
