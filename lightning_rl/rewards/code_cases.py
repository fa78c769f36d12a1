"""Tests of programs in the forms that data sets have."""

import ast
import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

from lightning_rl.rewards.answer_match import UnreadableReference

ENTRY_POINT, METADATA = "entry_point", "metadata"
CALLS, PROGRAMS = ("function_call", "functional"), (None, "stdin", "stdin_stdout")
KEYS = {"input", "output", "type", "testtype", "fn_name", METADATA}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)
TEST_FILE = "<test of a code reward>"
IMPORTS = (  # that solutions of LeetCode take for granted
    "import bisect, collections, copy, functools, heapq, itertools, json, math, operator, random, re, string, sys\n"
    "from bisect import *; from collections import *; from functools import *; from heapq import *\n"
    "from itertools import *; from math import ceil, comb, floor, gcd, inf, sqrt; from typing import *\n"
)

# Invalid escapes in tests. catch_warnings is not safe in the threads of rewards: it may leave all warnings ignored.
warnings.filterwarnings("ignore", category=SyntaxWarning, module=re.escape(TEST_FILE))


class InputOutput(NamedTuple):
    """Text that a program reads, and text that it has to print."""

    given: str
    wanted: str

    def program(self, source: str, end: str) -> tuple[str, str]:
        """Return the program and its stdin."""
        del end
        return source, self.given

    def accepts(self, stdout: str, end: str) -> bool:
        """Return True if the output is right; trailing whitespace of lines and of the whole is ignored."""
        del end
        return _lines(stdout) == _lines(self.wanted)


class Script(NamedTuple):
    """Code that runs after the program in the same process and raises if the program is wrong."""

    code: str

    def program(self, source: str, end: str) -> tuple[str, str]:
        """Return the program and its stdin; it prints ``end`` if the code ran to the end."""
        return f"{source}\n{self.code}\nprint({os.linesep + end!r})", ""

    def accepts(self, stdout: str, end: str) -> bool:
        """Return True if the code ran to the end."""
        return stdout.rstrip().endswith(end)


@dataclass(frozen=True)
class FunctionCall:
    """Call of a function of the program, or of a method of its ``class Solution``.

    Attributes:
        name: Name of the function.
        arguments: Positional arguments.
        wanted: Values of which it has to return one, as JSON gives them.
    """

    name: str
    arguments: Sequence[Any]
    wanted: Sequence[Any]

    def program(self, source: str, end: str) -> tuple[str, str]:
        """Return the program, which prints ``end`` and the result as JSON, and its stdin."""
        imports = "" if "from __future__" in source else IMPORTS
        call = (
            "import json as _json\n"
            f"_owner = Solution() if hasattr(globals().get('Solution'), {self.name!r}) else None\n"
            f"_function = getattr(_owner, {self.name!r}) if _owner else globals()[{self.name!r}]\n"
            f"_result = _function(*_json.loads({json.dumps(self.arguments)!r}))\n"
            f"print({os.linesep + end!r} + _json.dumps(_result, default=list))"
        )
        return f"{imports}{source}\n{call}", ""

    def accepts(self, stdout: str, end: str) -> bool:
        """Return True if the result is right."""
        try:
            result = json.loads(stdout.rpartition(end)[2])
        except ValueError:
            return False
        return any(result == value and isinstance(result, bool) == isinstance(value, bool) for value in self.wanted)


class AnyOf(NamedTuple):
    """Readings of an ambiguous test, of which the program has to pass one."""

    tests: Sequence[FunctionCall]


Test = InputOutput | Script | FunctionCall | AnyOf


def read_tests(tests: Any, entry_point: Any = None, metadata: Any = None) -> list[Test] | UnreadableReference:
    """Return the tests of a row, an empty list if the reward does not apply, or the parse error.

    Args:
        tests: Value of the column with the tests.
        entry_point: Value of the column ``entry_point``: name of the function to test.
        metadata: Value of the column ``metadata``: a mapping, or JSON of one, with this name as ``func_name``.
    """
    name = entry_point if entry_point is not None else _function_of(metadata)
    try:
        return [] if tests is None else [_test_of(test, name) for test in _list_of(tests)]
    except UnreadableReference as error:
        return error


def _function_of(metadata: Any) -> Any:
    value = _value(metadata) if isinstance(metadata, str) else metadata
    return value.get("func_name") if isinstance(value, Mapping) else None


def _list_of(tests: Any) -> Sequence[Any]:
    """Return the list of tests in any of the accepted forms."""
    if isinstance(tests, str):
        try:
            parsed = json.loads(tests)
        except (ValueError, RecursionError):
            return [tests]
        return _list_of(parsed) if isinstance(parsed, list | dict) else [tests]
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        inputs, outputs = tests["inputs"], tests["outputs"]
        listed = isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple)
        if not listed or len(inputs) != len(outputs) or tests.keys() - {"inputs", "outputs", "fn_name"}:
            raise UnreadableReference(
                f'expected as many "inputs" as "outputs" and no other keys than "fn_name", got {tests!r:.200}'
            )
        name = {} if tests.get("fn_name") is None else {"fn_name": tests["fn_name"]}
        return [{"input": given, "output": wanted, **name} for given, wanted in zip(inputs, outputs, strict=True)]
    if isinstance(tests, list | tuple) and len(tests) == 1 and isinstance(tests[0], list | tuple):
        return tests[0]
    return tests if isinstance(tests, list | tuple) else [tests]


def _test_of(test: Any, entry_point: Any) -> Test:
    """Return a test.

    Raises:
        UnreadableReference: If the value is not a test.
    """
    if isinstance(test, str):
        return Script(_script(test, entry_point))
    if not isinstance(test, Mapping) or not {"input", "output"} <= test.keys() or test.keys() - KEYS:
        raise UnreadableReference(
            'expected a test to be code or a mapping with "input" and "output", and no other keys than "type", '
            f'"testtype", "fn_name" and "metadata", got {test!r:.200}'
        )
    kind, name = test.get("type", test.get("testtype")), test.get("fn_name") or _function_of(test.get(METADATA))
    if name is not None or kind in CALLS:
        return _call(test, name or entry_point)
    if kind not in PROGRAMS or not all(isinstance(test[key], str | Real) for key in ("input", "output")):
        raise UnreadableReference(f'expected strings "input" and "output" of a program, got {test!r:.200}')
    return InputOutput(str(test["input"]), str(test["output"]))


def _call(test: Mapping[str, Any], name: Any) -> Test:
    if not isinstance(name, str) or not name.isidentifier():
        raise UnreadableReference(
            f'expected the name of the function to call, as "fn_name" of the test or in the column {ENTRY_POINT!r}, '
            f"got {name!r} for {test!r:.200}"
        )
    given, output = test["input"], test["output"]
    wanted = [output, _value(output)] if isinstance(output, str) else [output]
    wanted += [value[0] for value in wanted if isinstance(value, list | tuple) and len(value) == 1]
    try:
        wanted = json.loads(json.dumps(wanted))
        calls = [FunctionCall(name, json.loads(json.dumps(arguments)), wanted) for arguments in _arguments(given)]
    except (TypeError, ValueError) as error:
        raise UnreadableReference(f"expected arguments and a result that JSON can hold, got {test!r:.200}") from error
    return calls[0] if len(calls) == 1 else AnyOf(calls)


def _arguments(given: Any) -> list[list[Any]]:
    """Return the possible lists of arguments: a list, or one value per line; a single line may be the list."""
    if not isinstance(given, str):
        return [list(given) if isinstance(given, list | tuple) else [given]]
    lines = [_value(line) for line in given.splitlines() if line.strip()]
    return [lines, lines[0]] if len(lines) == 1 and isinstance(lines[0], list) else [lines]


def _value(text: str) -> Any:
    """Return the value of a text in JSON or Python, else the text."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return text


def _script(test: str, entry_point: Any) -> str:
    try:
        body = ast.parse(test, TEST_FILE).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableReference(f"expected a test to be Python, got {test!r:.200}: {error}") from error
    if not all(_defines(statement) for statement in body):
        return test
    functions = {statement.name: statement for statement in body if isinstance(statement, ast.FunctionDef)}
    if "check" in functions and isinstance(entry_point, str) and entry_point.isidentifier():
        return f"{test}\ncheck({entry_point})"
    names = [name for name, function in functions.items() if name.startswith("test") and not _parameters(function)]
    if names:
        return "\n".join([test, *(f"{name}()" for name in names)])
    raise UnreadableReference(
        f"expected a test to run something, such as an assert, got definitions only, which any program passes: "
        f"{test!r:.200}; a function named check needs the column {ENTRY_POINT!r} with the name of the function to check"
    )


def _parameters(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _defines(statement: ast.stmt) -> bool:
    """Return True if a statement tests nothing: a definition, an import, or an expression without a call."""
    if isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign):
        return not any(isinstance(part, ast.Call) for part in ast.walk(statement))
    return isinstance(statement, DEFINITIONS)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
