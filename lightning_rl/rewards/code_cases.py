"""Tests of programs in the forms that data sets have."""

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rl.rewards.answer_match import UnreadableReference
from lightning_rl.rewards.code_driver import NAMES, plain, with_int_keys

ENTRY_POINT, METADATA = "entry_point", "metadata"
CALLS, PROGRAMS = ("function_call", "functional"), (None, "stdin", "stdin_stdout")
KEYS = {"input", "output", "type", "testtype", "fn_name", METADATA}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)
METHOD = re.compile(r"(?:(Solution)(?:\(\))?\.)?([^\W\d]\w*)")
ENTRY = re.compile(r"(?:([^\W\d]\w*)(?:\(\))?\.)?([^\W\d]\w*)")
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
DRIVER = Path(__file__).with_name("code_driver.py").read_text(encoding="utf-8")
TEST_FILE = "<test of a code reward>"
IMPORTS = (  # that starters of LeetCode, LiveCodeBench and APPS take for granted
    "import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator, random, re, "
    "statistics, string, sys\nfrom bisect import *; from collections import *; from copy import copy, deepcopy\n"
    "from functools import *; from heapq import *; from itertools import *; from math import *\n"
    "from operator import *; from random import randint; from string import ascii_lowercase, ascii_uppercase, digits\n"
    "from typing import *\n"
    "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val, self.next = val, next\n"
    "class TreeNode:\n    def __init__(self, val=0, left=None, right=None):\n"
    "        self.val, self.left, self.right = val, left, right\n"
)
PACKED = re.compile("eJ[A-Za-z0-9+/]{30,}={0,2}")  # base64 of zlib
COLUMNS = ("public_tests", "private_tests", "generated_tests")  # of CodeContests
ASSERTS = re.compile("assert|expect|fail|check|raise|verify|exit", re.IGNORECASE)

# Invalid escapes in tests. catch_warnings is not safe in the threads of rewards: it may leave all warnings ignored.
warnings.filterwarnings("ignore", category=SyntaxWarning, module=re.escape(TEST_FILE))


class InputOutput(NamedTuple):
    """Text that a program reads, and text that it has to print."""

    given: str
    wanted: str

    def program(self, source: str, mark: str) -> tuple[str, str]:
        """Return the program and its stdin."""
        del mark
        return source, self.given

    def accepts(self, stdout: str, mark: str) -> bool:
        """Return True if the output is right; trailing whitespace of lines and of the whole is ignored."""
        del mark
        pairs = zip_longest(*(text.strip().splitlines() for text in (stdout, self.wanted)), fillvalue="\n")
        return all(_line_is(*pair) for pair in pairs)


@dataclass(frozen=True)
class ProgramTest:
    """Code that runs after the program in the same process and raises, or has a test that fails, for a wrong program.

    Attributes:
        code: Python code.
        modules: Modules that it imports.
        runner: Option of :func:`.code_driver.main`, as are ``tests``, ``imports`` and ``entered``.
    """

    code: str
    modules: tuple[str, ...] = ()
    runner: str | None = None
    tests: tuple[str, ...] = ()
    imports: str = ""
    entered: bool = False

    def program(self, source: str, mark: str) -> tuple[str, str]:
        """Return the program of the sandbox and its stdin."""
        return _driver(source, mark, **asdict(self)), ""

    def accepts(self, stdout: str, mark: str) -> bool:
        """Return True if the code ran to the end and its tests passed.

        Raises:
            UnreadableReference: If the code cannot run in this sandbox, or tests nothing.
        """
        result = _result(stdout, mark)
        if missing := result.get("missing"):
            raise UnreadableReference(
                f'expected a test that imports modules of the sandbox, or the program as "{NAMES[0]}", got '
                f"{missing!r:.200}: install it there, or rename it in the test"
            )
        if undefined := result.get("undefined"):
            raise UnreadableReference(
                f"expected a test that uses names of itself and the function to check, got {undefined!r:.200}, which "
                f"neither defines: add the definition to the test {self.code!r:.200}"
            )
        if unfit := result.get("unfit"):
            raise UnreadableReference(f"expected a test that {self.runner} can run, got {self.code!r:.200}: {unfit}")
        return result.get("passed") is True


@dataclass(frozen=True)
class FunctionCall:
    """Call of a function of the program, or of a method of its ``class Solution``.

    Attributes:
        name: Name of the function.
        arguments: Positional arguments, or keyword arguments as a mapping.
        wanted: Values of which it has to return one, as JSON gives them.
        int_keys: Option of :func:`.code_driver.main`.
    """

    name: str
    arguments: Sequence[Any] | Mapping[str, Any]
    wanted: Sequence[Any]
    int_keys: bool = False

    def program(self, source: str, mark: str) -> tuple[str, str]:
        """Return the program of the sandbox and its stdin."""
        options = {"function": self.name, "arguments": self.arguments, "int_keys": self.int_keys}
        return _driver(source, mark, imports=IMPORTS, **options), ""

    def accepts(self, stdout: str, mark: str) -> bool:
        """Return True if the result is right."""
        result = _result(stdout, mark)
        return "result" in result and any(_equal(result["result"], value) for value in self.wanted)


def _driver(program: str, mark: str, **options: Any) -> str:
    return f"{DRIVER}\n\nmain({program!r}, {mark!r}, **json.loads({json.dumps(options)!r}))\n"


def _result(stdout: str, mark: str) -> dict[str, Any]:
    """Return what the driver said; empty if it did not, or if the program said something else."""
    try:
        result = json.loads(stdout.rpartition(mark)[2].partition("\n")[0])
    except (ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}


def _equal(value: Any, wanted: Any) -> bool:
    """Return True for equal values of JSON; floats have the tolerance of ``numpy.allclose``."""
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(_equal, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(_equal(value[key], wanted[key]) for key in wanted)
    if isinstance(value, float) or isinstance(wanted, float):
        return isinstance(value, Real) and isinstance(wanted, Real) and _close(value, wanted)
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def _close(value: Any, wanted: Any) -> bool:
    try:
        near = abs(value - wanted) <= 1e-8 + 1e-5 * abs(wanted) < math.inf
    except OverflowError:  # an integer too large for a float
        return False
    return near or value == wanted or (value != value and wanted != wanted)  # NaN


def _line_is(line: str, wanted: str) -> bool:
    """Return True if lines are equal; decimal fractions among their words have a tolerance, and 2.0 is 2."""
    words, targets = (re.split(r"(\s+)", text.rstrip()) for text in (line, wanted))
    return len(words) == len(targets) and all(
        word == target
        or (_is_fraction(target) and NUMBER.fullmatch(word) and _close(float(word), float(target)))
        or (NUMBER.fullmatch(target) and re.fullmatch(rf"{re.escape(target)}\.0*", word))
        for word, target in zip(words, targets, strict=True)
    )


def _is_fraction(word: str) -> bool:
    return NUMBER.fullmatch(word) is not None and not word.lstrip("+-").isdecimal()


class AnyOf(NamedTuple):
    """Readings of an ambiguous test, of which the program has to pass one."""

    tests: Sequence[FunctionCall]


Test = InputOutput | ProgramTest | FunctionCall | AnyOf


def read_tests(
    tests: Any, entry_point: Any = None, metadata: Any = None, *, max_output: int | None = None
) -> list[Test] | UnreadableReference:
    """Return the tests of a row, an empty list if the reward does not apply, or the parse error.

    Args:
        tests: Value of the column with the tests.
        entry_point: Value of the column ``entry_point``: name of the function to test.
        metadata: Value of the column ``metadata``: a mapping, or JSON of one, with this name as ``func_name``.
        max_output: Bytes that a program can print; None for no limit.
    """
    name = entry_point if entry_point is not None else _function_of(metadata)
    try:
        read = [] if tests is None else [_test_of(test, name) for test in _list_of(tests)]
        if max_output is not None and (size := max(map(_bytes_of, read), default=0)) > max_output:
            raise UnreadableReference(
                f"expected an output of at most {max_output} bytes, got a test that wants {size}, which no program can "
                "print in this sandbox: raise Sandbox(output=), or leave the test out"
            )
        return read
    except UnreadableReference as error:
        return error


def _bytes_of(test: Test) -> int:
    """Return the size of the smallest output that passes."""
    if isinstance(test, AnyOf):
        return min(map(_bytes_of, test.tests))
    if isinstance(test, ProgramTest):
        return 0
    texts = [test.wanted.strip()] if isinstance(test, InputOutput) else map(json.dumps, test.wanted)
    return min(len(text.encode(errors="replace")) for text in texts)


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
    if isinstance(tests, Mapping) and tests.keys() and tests.keys() <= set(COLUMNS):
        return [test for column in COLUMNS if tests.get(column) is not None for test in _list_of(tests[column])]
    if isinstance(tests, Mapping) and tests.keys() == {"input", "output"} and _are_texts(*tests.values()):
        tests = {"inputs": tests["input"], "outputs": tests["output"]}
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


def _are_texts(inputs: Any, outputs: Any) -> bool:
    """Return True for as many texts of programs as outputs; lists of other lengths are the lines of one program."""
    listed = isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple) and len(inputs) == len(outputs)
    return listed and all(isinstance(text, str) for text in (*inputs, *outputs))


def _test_of(test: Any, entry_point: Any) -> Test:
    """Return a test.

    Raises:
        UnreadableReference: If the value is not a test.
    """
    if isinstance(test, str):
        if PACKED.fullmatch(test.strip()):
            raise UnreadableReference(
                f"expected tests, got packed ones as of LiveCodeBench, {test!r:.40}: unpack them before the run by "
                "json, pickle, zlib and base64 as the data set describes, if you trust it: unpickling runs its code"
            )
        return _script(test, entry_point)
    if not isinstance(test, Mapping) or not {"input", "output"} <= test.keys() or test.keys() - KEYS:
        raise UnreadableReference(
            'expected a test to be code or a mapping with "input" and "output", and no other keys than "type", '
            f'"testtype", "fn_name" and "metadata", got {test!r:.200}'
        )
    kind, name = test.get("type", test.get("testtype")), test.get("fn_name") or _function_of(test.get(METADATA))
    if name is not None or kind in CALLS:
        return _call(test, name or entry_point)
    given, wanted = (_text_of(test[key]) for key in ("input", "output"))
    if kind not in PROGRAMS or given is None or wanted is None:
        raise UnreadableReference(f'expected strings "input" and "output" of a program, got {test!r:.200}')
    return InputOutput(given, wanted)


def _text_of(value: Any) -> str | None:
    """Return an input or output of a program, which may be a list of lines; None for another value."""
    if isinstance(value, list | tuple) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return str(value) if isinstance(value, str | Real) else None


def _call(test: Mapping[str, Any], name: Any) -> Test:
    method = METHOD.fullmatch(name) if isinstance(name, str) else None
    if method is None:
        raise UnreadableReference(
            f'expected the name of the function to call, as "fn_name" of the test or in the column {ENTRY_POINT!r}, '
            f"got {name!r} for {test!r:.200}"
        )
    given, output = test["input"], test["output"]
    wanted = [output, _value(output)] if isinstance(output, str) else [output]
    wanted += [value[0] for value in wanted if isinstance(value, list | tuple) and len(value) == 1]
    try:
        wanted = json.loads(json.dumps(wanted, default=plain))
        calls = list[FunctionCall]()
        for arguments in _arguments(given):
            text = json.dumps(arguments, default=plain)
            values = json.loads(text)
            calls.append(FunctionCall(method[2], values, wanted))
            if json.loads(text, object_hook=with_int_keys) != values:  # JSON has no integers as keys
                calls.append(FunctionCall(method[2], values, wanted, int_keys=True))
    except (TypeError, ValueError) as error:
        raise UnreadableReference(f"expected arguments and a result that JSON can hold, got {test!r:.200}") from error
    return calls[0] if len(calls) == 1 else AnyOf(calls)


def _arguments(given: Any) -> list[Any]:
    """Return the possible arguments: a list, keywords, or one value per line; a single line may be the list."""
    lines = [_value(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else [given]
    if len(lines) != 1 or not isinstance(lines[0], list | tuple | Mapping):
        return [lines]
    readings = [dict(lines[0]) if isinstance(lines[0], Mapping) else list(lines[0])]
    return readings if isinstance(given, list | tuple) else [*readings, lines]


def _value(text: str) -> Any:
    """Return the value of a text in JSON or Python, else the text."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return text


def _script(test: str, entry_point: Any) -> ProgramTest:
    """Return code that runs all tests of a text, or names them for the runner that they need."""
    try:
        body = ast.parse(test, TEST_FILE).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableReference(f"expected a test to be Python, got {test!r:.200}: {error}") from error
    statements = [statement for statement in body if not _defines(statement)]
    called = {part.id for statement in statements for part in ast.walk(statement) if isinstance(part, ast.Name)}
    modules = _modules(body)
    functions = {part.name: part for part in body if isinstance(part, FUNCTIONS)}
    tests = {name: part for name, part in functions.items() if name.startswith("test")}
    classes = {part.name: part for part in body if isinstance(part, ast.ClassDef) and _has_tests(part)}
    entry = ENTRY.fullmatch(entry_point) if isinstance(entry_point, str) else None
    checks = "check" in functions and "check" not in called
    if not any(map(_asserts, ast.walk(ast.Module(body, [])))) or not (tests or classes or statements or checks):
        raise UnreadableReference(
            f"expected a test that fails for a wrong program, such as an assert, got code that any program passes: "
            f"{test!r:.200}"
        )
    if called & tests.keys():
        return ProgramTest(test, modules)
    if tests or classes:
        needs_pytest = (
            "pytest" in modules
            or any(name.startswith(("setup", "teardown")) for name in functions)
            or any(isinstance(part, ast.AsyncFunctionDef) or _parameters(part) for part in tests.values())
            or not all("TestCase" in test and part.bases for part in classes.values())
        )
        if needs_pytest:
            return ProgramTest(test, modules, "pytest", (*tests, *classes))
        code = "\n".join([test, *(f"{name}()" for name in tests)])
        return ProgramTest(code, modules, "unittest", tuple(classes)) if classes else ProgramTest(code, modules)
    if entry and (checks or "candidate" in called):
        owner, name = entry[1] or "Solution", entry[2]
        candidate = (
            f"candidate = {owner}().{name} if hasattr(globals().get({owner!r}), {name!r}) else globals()[{name!r}]"
        )
        return ProgramTest(
            f"{candidate}\n{test}" + ("\ncheck(candidate)" if checks else ""), modules, imports=IMPORTS, entered=True
        )
    if statements and not checks:
        return ProgramTest(test, modules)
    raise UnreadableReference(
        f"expected the column {ENTRY_POINT!r} with the name of the function to check, such as 'f' or 'Solution().f', "
        f"got {entry_point!r} for {test!r:.200}"
    )


def _asserts(part: ast.AST) -> bool:
    """Return True for code that may raise on purpose: an assert, a raise, or a name such as ``assertEqual``."""
    name = part.id if isinstance(part, ast.Name) else part.attr if isinstance(part, ast.Attribute) else ""
    return isinstance(part, ast.Assert | ast.Raise) or ASSERTS.search(name) is not None


def _modules(body: Sequence[ast.stmt]) -> tuple[str, ...]:
    """Return the modules that code imports, without packages of relative imports.

    Raises:
        UnreadableReference: If an import is relative.
    """
    parts = [part for statement in body for part in ast.walk(statement)]
    if relative := [part for part in parts if isinstance(part, ast.ImportFrom) and part.level]:
        raise UnreadableReference(
            f'expected a test to import the program as "{NAMES[0]}", got the relative import '
            f"{ast.unparse(relative[0])!r}: rename it in the test"
        )
    names = [alias.name for part in parts if isinstance(part, ast.Import) for alias in part.names]
    names += [part.module or "" for part in parts if isinstance(part, ast.ImportFrom)]
    return tuple(dict.fromkeys(name.partition(".")[0] for name in names))


def _has_tests(part: ast.ClassDef) -> bool:
    """Return True for a class that unittest or pytest collects."""
    named = part.bases or part.name.startswith("Test")
    return bool(named) and any(isinstance(each, FUNCTIONS) and each.name.startswith("test") for each in part.body)


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Any]:
    """Return parameters and decorators."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs, *function.decorator_list]


def _defines(statement: ast.stmt) -> bool:
    """Return True if a statement tests nothing: a definition, an import, or an expression without a call."""
    if isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign):
        return not any(isinstance(part, ast.Call) for part in ast.walk(statement))
    return isinstance(statement, DEFINITIONS)
