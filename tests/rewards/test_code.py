"""Code: tests of inputs and outputs, and assertions, on programs out of completions."""

import base64
import json
import math
import re
import subprocess
import sys
import zlib
from typing import Any

import pytest
from kit.skips import need_sandbox

from lightning_rl.rewards import CodeTests, Sandbox, SandboxUnavailable, sandbox
from lightning_rl.rewards.answer_match import UnreadableReference
from lightning_rl.rewards.code import code_of
from lightning_rl.rewards.code_cases import FunctionCall, InputOutput, ProgramTest, read_tests

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
        ("1. Do:\n   ```python\n   if x:\n       b\n   ```\n   Done.", "if x:\n    b"),
        ("- ```python\n  b\n  ```", "b"),
        ("~~~python\nb\n~~~\n", "b"),
        ("```{.python .numberLines}\nb\n```", "b"),
        ("```{python}\nb\n```\n```text\nc\n```", "b"),
        ('```Python title="a.py"\nb\n```', "b"),
        ("```python3.11\nb\n```\n```\nc\n```", "b"),
        ("````python\n'''\n```\nb\n```\n'''\n````", "'''\n```\nb\n```\n'''"),
        ("```python\nb\n```\n```python\n```", ""),
        ("Call ```f(1)``` as in\n```python\nb\n```", "b"),
        ("```python\nb```\n", "b"),
        ("With `b`: ```python\nb\n```", "b"),
        ("~" * 10**4 + "`\n", None),
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
        "import atexit, inspect, os\natexit.register(print, 4)\ndef f(x): return x * x\n"
        "assert inspect.getsource(f) and os.path.exists(__file__)",
    ]
    values = [reward()([""], [f"```python\n{program}\n```"], tests=tests) for program in programs]
    assert values == [[1.0], [0.5], [0.0], [0.0], [0.0], [1.0]]


def test_another_column_and_what_is_no_test() -> None:
    assert reward(tests="cases")([""], [DOUBLE], cases=[CASES]) == [1.0]
    with pytest.raises(
        ValueError, match=r"expected a column 'tests' for CodeTests\(tests='tests'\), got the columns \['cases'\]"
    ):
        reward()([""], [DOUBLE], cases=[CASES])
    logged: dict[str, Any] = {}
    with pytest.warns(UserWarning, match='expected a test to be code or a mapping with "input" .* got 3'):
        values = reward()(["", ""], [DOUBLE, DOUBLE], tests=[[3], CASES], log_extra=logged.__setitem__)
    assert "got 3" in logged["reason"][0] and logged["reason"][1] is None
    assert math.isnan(values[0] or 0) and values[1] == 1.0, "a bad row costs no other"


def test_a_machine_without_bubblewrap_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match='got no "bwrap"'):
        CodeTests(sandbox=Sandbox(seconds=21.0))


HUMAN_EVAL = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == 4\n"
ONE = {"input": "2", "output": "4"}
READ = InputOutput("2", "4")
PACKED = base64.b64encode(zlib.compress(json.dumps([ONE]).encode())).decode()
ASSERT = ProgramTest("assert f(2) == 4")


@pytest.mark.parametrize(
    ("tests", "read"),
    [
        (None, []),
        ([], []),
        ([ONE, "assert f(2) == 4"], [READ, ASSERT]),
        (ONE, [READ]),
        ([[ONE]], [READ]),
        ({**ONE, "type": "stdin_stdout"}, [READ]),
        ("assert f(2) == 4", [ASSERT]),
        ({"inputs": ["2", "3"], "outputs": ["4", "6"]}, [READ, InputOutput("3", "6")]),
        ({"inputs": [["2", "3"]], "outputs": [["4"]]}, [InputOutput("2\n3", "4")]),
        (json.dumps([ONE]), [READ]),
        (json.dumps({"inputs": ["2"], "outputs": ["4"]}), [READ]),
        (json.dumps(["assert f(2) == 4"]), [ASSERT]),
        ({"input": ["2", "3"], "output": ["4", "6"]}, [READ, InputOutput("3", "6")]),
        ({"input": ["2", "3"], "output": ["4"]}, [InputOutput("2\n3", "4")]),
        ({"private_tests": {"input": [], "output": []}, "public_tests": {"input": ["2"], "output": ["4"]}}, [READ]),
        (f"{HUMAN_EVAL}\ncheck(f)", [ProgramTest(f"{HUMAN_EVAL}\ncheck(f)")]),
        ("def test_a():\n    assert f(2) == 4", [ProgramTest("def test_a():\n    assert f(2) == 4\ntest_a()")]),
    ],
)
def test_the_forms_that_tests_have(tests: Any, read: Any) -> None:
    assert read_tests(tests, "f") == read


FIRST = "def f(x):\n    return x[0] if isinstance(x, list) else x"
METHOD = "class Solution:\n    def f(self, nums: List[int], k: int) -> int:\n        return sum(nums) + k"
TWICE = "def f(x):\n    return 2 * x"


@pytest.mark.parametrize(
    ("program", "tests", "columns", "value"),
    [
        (FIRST, [[{"fn_name": "f", "input": "[1]", "output": "1", "type": "function_call"}]], {}, 1.0),
        (
            METHOD,
            {"input": "[1,2]\n3", "output": "6", "testtype": "functional"},
            {"metadata": '{"func_name": "f"}'},
            1.0,
        ),
        (
            METHOD,
            {"input": "[1,2]\n3", "output": "7", "testtype": "functional"},
            {"metadata": '{"func_name": "f"}'},
            0.0,
        ),
        (METHOD, {"input": "[1,2]\n3", "output": "6", "metadata": {"func_name": "f"}}, {}, 1.0),
        (TWICE, {"input": "2", "output": "4", "type": "function_call"}, {"entry_point": "f"}, 1.0),
        (TWICE, {"inputs": [[2], ["a"]], "outputs": [4, ["aa"]], "fn_name": "f"}, {}, 1.0),
        (TWICE, {"inputs": [[2], ["a"]], "outputs": [4, "a"], "fn_name": "f"}, {}, 0.5),
        (TWICE, "def test_a():\n    assert f(2) == 4\ndef test_b():\n    assert f(1) == 2", {}, 1.0),
        (TWICE, "def test_a():\n    assert f(2) == 5", {}, 0.0),
        ("f = lambda x: x > 0", {"input": "2", "output": "true", "fn_name": "f"}, {}, 1.0),
        ("f = lambda x: x > 0", {"input": "2", "output": "1", "fn_name": "f"}, {}, 0.0),
        ("f = lambda x: (x, {1: 2})", {"input": "2", "output": '[2, {"1": 2}]', "fn_name": "f"}, {}, 1.0),
        ("print(4)\ndef f(x): print(x); raise SystemExit(0)", {"input": "2", "output": "4", "fn_name": "f"}, {}, 0.0),
        ("from __future__ import annotations\nf = lambda x: x", {"input": "2", "output": "2", "fn_name": "f"}, {}, 1.0),
        ("f = pow", {"input": "2\n3\n5", "output": "3", "fn_name": "f"}, {}, 1.0),
        ("def g(x): return x", {"input": "2", "output": "2", "fn_name": "f"}, {}, 0.0),
        ("f = lambda x: x * 1.1", {"inputs": [[3]], "outputs": [3.3], "fn_name": "f"}, {}, 1.0),
        ("f = lambda x: x * 1.2", {"inputs": [[3]], "outputs": [3.3], "fn_name": "f"}, {}, 0.0),
        (
            "f = lambda x: [(x * 1.1, {'a': 2})]",
            {"input": "3", "output": '[[3.3, {"a": 2.0}]]', "fn_name": "f"},
            {},
            1.0,
        ),
        ("f = lambda x: [x > 1, 2]", {"input": "3", "output": "[1, 2]", "fn_name": "f"}, {}, 0.0),
        ("f = lambda x: [x, 2, 3]", {"input": "3", "output": "[3, 2]", "fn_name": "f"}, {}, 0.0),
        ("f = lambda x: 10**400 + x", {"input": "3", "output": "1.5", "fn_name": "f"}, {}, 0.0),
        ("f = lambda x: 1e-10 * x", {"input": "1", "output": "2e-7", "fn_name": "f"}, {}, 0.0),
        ("f = lambda x: float('nan')", {"input": "1", "output": "NaN", "fn_name": "f"}, {}, 1.0),
        (
            "import numpy as np\nf = lambda x: np.arange(x) / 2",
            {"input": "2", "output": "[0, 0.5]", "fn_name": "f"},
            {},
            1.0,
        ),
        (
            "from fractions import *\nf = lambda x: Fraction(x, 2)",
            {"input": "1", "output": "0.5", "fn_name": "f"},
            {},
            1.0,
        ),
        ("f = lambda a, b: a - b", {"input": {"b": 1, "a": 3}, "output": 2, "fn_name": "f"}, {}, 1.0),
        ("f = lambda a, b: a - b", {"input": '{"b": 1, "a": 3}', "output": "2", "fn_name": "f"}, {}, 1.0),
        ("f = lambda d: d['a']", {"input": {"b": 1, "a": 3}, "output": 3, "fn_name": "f"}, {}, 1.0),
        ("f = lambda d: d[-1][0]", {"inputs": [[{"-1": [5]}]], "outputs": [5], "fn_name": "f"}, {}, 1.0),
        ("f = lambda d: d['1']", {"inputs": [[{"1": 5}]], "outputs": [5], "fn_name": "f"}, {}, 1.0),
        ("f = lambda d: d[0][7]", {"input": "{0: {7: 5}}\n", "output": "5", "fn_name": "f"}, {}, 1.0),
        ("f = lambda d, e: len(d) + e[1]", {"input": '{"a": 4}\n{"1": 5}', "output": "6", "fn_name": "f"}, {}, 1.0),
        ("f = lambda d: d['a']", {"inputs": [[{"1": 5}]], "outputs": [5], "fn_name": "f"}, {}, 0.0),
        (METHOD, {"input": "[1,2]\n3", "output": "6", "fn_name": "Solution().f"}, {}, 1.0),
        (
            "class Solution:\n    def f(self, x: Optional[ListNode]) -> TreeNode:\n"
            "        return TreeNode(ListNode(x).val).val",
            "def check(candidate):\n    assert candidate(4) == 4",
            {"entry_point": "Solution().f"},
            1.0,
        ),
        ("f = lambda x: {'b', 'a', x}", {"input": '"c"', "output": "{'c', 'a', 'b'}", "fn_name": "f"}, {}, 1.0),
    ],
)
def test_functions_are_called(program: str, tests: Any, columns: dict[str, Any], value: float) -> None:
    rows: dict[str, Any] = {name: [cell] for name, cell in columns.items()}
    assert reward()([""], [f"```python\n{program}\n```"], tests=[tests], **rows) == [value]


ANYTHING = "class X:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
LOCAL = "def f(x):\n    class X:\n        def __eq__(self, other): return True\n    return X()"
KIND = "class M(type):\n    def __eq__(self, other): return True\nclass X(metaclass=M): pass\ndef f(x): return X"
MONEY = """class Money:
    def __init__(self, n): self.n = n
    def __eq__(self, other): return self.n == getattr(other, "n", other)
def pay(n): return Money(n)
def f(x): return 4 if Money(x) == 2 and Money(x) != 3 else 0"""


@pytest.mark.parametrize(
    ("program", "test", "value"),
    [
        *((program, "assert f(2) == 4", 0.0) for program in (ANYTHING + "def f(x): return X()", LOCAL, KIND)),
        *((ANYTHING + f"def f(x): return {result}", "assert f(2) == [4]", 0.0) for result in ("X()", "[X()]")),
        (ANYTHING + "class Solution:\n    def f(self, x): return X()", "assert Solution().f(2) == 4", 0.0),
        (ANYTHING + "def f(x): return X()", "def test_a():\n    from solution import f\n    assert f(2) == 4", 0.0),
        (
            ANYTHING + "def f(x): return X()",
            "import unittest\nclass A(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(2), 4)",
            0.0,
        ),
        *(
            (MONEY, f"assert {test}", 1.0)
            for test in ("pay(2) == pay(2)", "pay(2) != pay(3)", "Money(2) == 2", "f(2) == 4")
        ),
        (MONEY, "class Any:\n    def __eq__(self, other): return True\nassert pay(2) == Any()", 1.0),
    ],
)
def test_only_an_equal_result_passes_an_assertion(program: str, test: str, value: float) -> None:
    assert reward()([""], [f"```python\n{program}\n```"], tests=[[test]]) == [value]


@pytest.mark.parametrize("test", [HUMAN_EVAL, f"{HUMAN_EVAL}\ncheck(candidate)", "assert candidate(2) == 4"])
@pytest.mark.parametrize("entry_point", ["f", "Solution().f", "Solution.f"])
def test_an_entry_point_may_be_a_method_and_use_the_names_of_its_starter(test: str, entry_point: str) -> None:
    method = "class Solution:\n    def f(self, x: Optional[int]) -> int:\n        return math.prod([2, x])"
    blocks = [f"```python\n{program}\n```" for program in (method, method.replace("2", "3"), "gcd = f = None")]
    assert reward()([""] * 3, blocks, tests=[test] * 3, entry_point=[entry_point] * 3) == [1.0, 0.0, 0.0]


def test_an_import_of_the_starter_is_no_program() -> None:
    tests = [{"fn_name": "gcd", "input": "[4, 6]", "output": "2"}, "assert candidate(4, 6) == 2"]
    assert reward()([""], ["```python\nx = 1\n```"], tests=[tests], entry_point=["gcd"]) == [0.0]


ADD = "def add(a, b):\n    return sum(a) if isinstance(a, list) else a + b\n"
SUBTRACT = ADD.replace("+", "-")
ENDS = ["print(add(int(input()), 1))", "sys.exit(0)", "unittest.main()", "raise ValueError"]
CHECKS: list[Any] = [
    "assert add(1, 2) == 3",
    "def check(candidate):\n    assert candidate(1, 2) == 3",
    "import random\nrandom.seed(1)\ndef check(candidate):\n    assert candidate(1, 2) == 3",
    "x = add(1, 2)\ndef test_a():\n    assert x == 3",
    {"fn_name": "add", "input": "[1, 2]", "output": "3"},
    "if __name__ == '__main__':\n    assert add(1, 2) == 3",
    "from solution import add as plus\nassert plus(1, 2) == 3",
    "import main\nassert main.add(1, 2) == 3",
    "from your_module import *\ndef test_a():\n    assert add(1, 2) == 3",
    "from unittest.mock import patch\ndef test_a():\n    with patch('builtins.sum', return_value=4):\n"
    "        assert add(1, 2) == 3 and add([1], [2]) == 4",
    "import unittest\nclass TestCases(unittest.TestCase):\n    def test_a(self):\n        "
    "self.assertEqual(add(1, 2), 3)\nif __name__ == '__main__':\n    unittest.main()",
    "from unittest import TestCase, main\nclass Base(TestCase):\n    def setUp(self):\n        self.x = add(1, 2)\n"
    "class More(Base):\n    def test_a(self):\n        self.assertEqual(self.x, 3)\nmain()",
    "import pytest\nfrom solution import add\n"
    "@pytest.mark.parametrize('a', [1, 2])\ndef test_a(a):\n    assert add(a, 2) == a + 2",
    "class TestAdd:\n    def setup_method(self):\n        self.x = add(1, 2)\n"
    "    def test_a(self):\n        assert self.x == 3",
    "import pytest\n@pytest.fixture\ndef one():\n    return 1\ndef test_a(one, capsys):\n    assert add(one, 2) == 3",
    "import pytest\n@pytest.fixture(autouse=True)\ndef one():\n    assert add(1, 2) == 3\ndef test_a():\n    pass",
]


@pytest.mark.parametrize("test", CHECKS, ids=range(len(CHECKS)))
def test_a_program_under_a_call_or_code_is_a_module_that_is_imported(test: Any) -> None:
    guarded = "import sys, unittest\n%sclass TestOwn(unittest.TestCase):\n    def test_own(self): 1 / 0\n"
    guarded = f"{guarded % ADD}if __name__ == '__main__':\n    " + ENDS[CHECKS.index(test) % 4]
    wrong = ["x = 1", f"{ADD}raise SystemExit(0)", f"{ADD}input()"][CHECKS.index(test) % 3]
    blocks = [f"```python\n{program}\n```" for program in (guarded, SUBTRACT, wrong)]
    assert reward()([""] * 3, blocks, tests=[[test]] * 3, entry_point=["add"] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("import no_such_module\nassert add(1, 2) == 3", r"program as \"solution\", got \['no_such_module'\]"),
        ("from .solution import add\nassert add(1, 2) == 3", r"relative"),
        ("def check(candidate):\n    assert is_same(candidate(1, 2), 3)", "got 'is_same', which neither defines"),
        ("def test_a(no_such_fixture):\n    assert add(1, 2) == 3", "fixture 'no_such_fixture' not found"),
        ("async def test_a():\n    assert add(1, 2) == 3", "async def functions are not natively supported"),
        ("import pytest\n@pytest.mark.skip\ndef test_a():\n    assert add(1, 2) == 3", "ran no test"),
        (
            "import unittest\n@unittest.skip('x')\nclass A(unittest.TestCase):\n    def test_a(self): self.fail()",
            "ran no test",
        ),
    ],
)
def test_a_test_that_cannot_run_fails_its_row_with_the_reason(test: str, message: str) -> None:
    logged: dict[str, Any] = {}
    with pytest.warns(UserWarning, match=message):
        values = reward()(
            [""], [f"```python\n{ADD}\n```"], tests=[test], entry_point=["add"], log_extra=logged.__setitem__
        )
    assert math.isnan(values[0] or 0) and re.search(message, logged["reason"][0])


def test_a_name_that_the_program_of_a_check_does_not_define_is_its_fault() -> None:
    check = "def check(candidate):\n    assert candidate(1, 2) == 3"
    programs = ["x = 1", "def add(a, b): return missing"]
    blocks = [f"```python\n{program}\n```" for program in programs]
    assert reward()([""] * 2, blocks, tests=[check] * 2, entry_point=["add"] * 2) == [0.0] * 2


@pytest.mark.parametrize("test", [{"input": "", "output": "é" * 9}, {"fn_name": "f", "input": "", "output": "a" * 17}])
def test_a_reference_above_the_output_limit_fails_its_row(test: dict[str, Any]) -> None:
    need_sandbox()
    small = CodeTests(sandbox=Sandbox(seconds=30.0, output=16), partial=False)
    with pytest.warns(UserWarning, match=r"expected an output of at most 16 bytes, got .*raise Sandbox\(output=\)"):
        values = small([""], ["```python\nprint(1)\n```"], tests=[[{"input": "", "output": "2"}, test]])
    assert math.isnan(values[0] or 0)


@pytest.mark.parametrize(
    ("printed", "wanted", "value"),
    [
        ("3.3000000000000003", "3.3", 1.0),
        ("x 1\n0.33333333", "x 1\n0.333333333", 1.0),
        ("1", "1.0", 1.0),
        ("3.4", "3.3", 0.0),
        ("31", "30", 0.0),
        ("1.0000001", "1", 0.0),
        ("a 2.0\n-3.00 4", "a 2\n-3 4", 1.0),
        ("2.01", "2", 0.0),
        ("x.0", "x", 0.0),
        ("7.0", "07", 0.0),
        ("9007199254740993.0", "9007199254740992", 0.0),
        ("1  2.5", "1 2.5", 0.0),
        ("1.5 2", "1.5", 0.0),
        ("1" * 60_000 + "x", "1.5", 0.0),
    ],
)
def test_decimal_fractions_of_an_output_have_a_tolerance(printed: str, wanted: str, value: float) -> None:
    assert InputOutput("", wanted).accepts(printed, "") == bool(value)


@pytest.mark.parametrize("said", ["4", "[", "[" * 10**5, '{"passed": 1}', "{}", "", "1" * 5000])
def test_a_program_that_knows_the_mark_cannot_fail_other_rows(said: str) -> None:
    for test in (ASSERT, FunctionCall("f", [2], [4])):
        assert not test.accepts(f"\nmark{said}\n", "mark")


@pytest.mark.nightly
def test_an_invalid_escape_in_a_test_gives_no_warning() -> None:
    script = "from lightning_rl.rewards.code_cases import read_tests; read_tests(r\"assert f('\\d') == 4\", 'f')"
    run = subprocess.run([sys.executable, "-W", "default", "-c", script], capture_output=True, text=True, check=True)
    assert "SyntaxWarning" not in run.stderr


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (5, "to be code or a mapping"),
        ([5], "to be code or a mapping"),
        ("", "code that any program passes"),
        (PACKED, "got packed ones .*unpack them"),
        ({"private_tests": PACKED, "public_tests": [ONE]}, "got packed ones .*unpack them"),
        ("import unittest\nclass TestF(unittest.TestCase):\n    pass", "code that any program passes"),
        ("print(f(2))", "code that any program passes"),
        ("def test_f():\n    f(2) == 4", "code that any program passes"),
        ("def check(candidate):\n    candidate(2) == 4", "code that any program passes"),
        ("def helper():\n    assert f(2) == 4", "code that any program passes"),
        (HUMAN_EVAL, "expected the column 'entry_point'"),
        ("assert f(2) =", "to be Python"),
        ("[1, 2]", "to be code or a mapping"),
        ({"a": 1}, "to be code or a mapping"),
        ({"input": [2], "output": "4"}, 'expected strings "input" and "output" of a program'),
        ({**ONE, "type": "interactive"}, 'expected strings "input" and "output" of a program'),
        ({**ONE, "checker": "any order"}, 'no other keys than "type"'),
        ({**ONE, "testtype": "functional"}, "expected the name of the function to call"),
        ({"inputs": ["2"], "outputs": []}, 'as many "inputs" as "outputs"'),
        ({"inputs": "2", "outputs": "4"}, 'as many "inputs" as "outputs"'),
        ({"inputs": ["2"], "outputs": ["4"], "checker": "f"}, 'no other keys than "fn_name"'),
        ({"inputs": [[2]], "outputs": ["4"]}, 'expected strings "input" and "output" of a program'),
    ],
)
def test_what_is_no_test_is_none(tests: Any, message: str) -> None:
    found = read_tests(tests)
    assert isinstance(found, UnreadableReference) and (message in str(found) or re.search(message, str(found)))
