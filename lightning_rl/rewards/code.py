"""Reward for code: share of unit tests that the generated program passes in a sandbox."""

import ast
import json
import math
import os
import re
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Real
from typing import Any

from lightning_rl.rewards.answer_match import UnreadableReference, warn_of_unreadable
from lightning_rl.rewards.sandbox import Sandbox, SandboxUnavailable
from lightning_rl.rewards.sandbox_service import SandboxService
from lightning_rl.rewards.text import column_of, texts_of
from lightning_rl.utils.arguments import check_counts, check_text

ENTRY_POINT = "entry_point"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)
TEST_FILE = "<test of a code reward>"
BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)

# Invalid escapes in tests. catch_warnings is not safe in the threads of rewards: it may leave all warnings ignored.
warnings.filterwarnings("ignore", category=SyntaxWarning, module=re.escape(TEST_FILE))


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTests:
    """Share of tests that the last Python code block of a completion passes.

    A test is a mapping with ``"input"`` (stdin) and ``"output"`` (expected stdout; trailing whitespace of lines and of
    the whole is ignored), or a string of code such as ``assert f(2) == 4`` that runs after the program in the same
    process. A program can cheat the second kind, so use inputs and outputs where that matters. A completion without a
    code block scores 0. A row whose tests are None gets None.

    The tests of a row are a list of tests, a single test, a mapping of lists ``{"inputs": [...], "outputs": [...]}``,
    or JSON of one of these. Code that only defines a function ``check``, as in HumanEval, is followed by a call of
    ``check`` with the function named in the column ``entry_point``. A row with other tests, invalid Python or code that
    tests nothing gets NaN, is left out of training and is counted as failed; a warning shows the first, and the file of
    failed samples has each as ``reason``.

    Args:
        tests: Name of the column with the tests of each row.
        sandbox: Sandbox of the programs, a new one per test: local, or remote by a :class:`SandboxService`. A row whose
            programs could not run gets NaN; a warning shows the first.
        partial: Return the share of passed tests, rather than 1 only if all pass.
        parallel: Number of programs that run at the same time.

    Raises:
        SandboxUnavailable: If this machine cannot isolate programs, or the service does not answer.
        ValueError: If an option is out of range, or no program can run within the limits of the sandbox.
    """

    tests: str = "tests"
    sandbox: Sandbox | SandboxService = Sandbox()  # noqa: RUF009  frozen
    partial: bool = True
    parallel: int = 2

    def __post_init__(self) -> None:  # noqa: D105
        check_counts(1, parallel=self.parallel)
        check_text(tests=self.tests)
        if not isinstance(self.sandbox, Sandbox | SandboxService):
            raise ValueError(f"expected sandbox to be a Sandbox(...) or SandboxService(...), got {self.sandbox!r:.200}")
        self.sandbox.check()

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        log_extra: Callable[[str, Sequence[Any]], object] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return the share of tests that each completion passes.

        Raises:
            ValueError: If the column is missing.
        """
        del prompts  # only the tests score a program
        texts = texts_of(completions)
        column = column_of(columns, self.tests, len(texts), option="tests", reward=self)
        names = columns.get(ENTRY_POINT, [None] * len(texts))
        cases = [_read(tests, name) for tests, name in zip(column, names, strict=True)]
        with ThreadPoolExecutor(self.parallel) as pool:
            scores = list(pool.map(self._score, texts, cases))
        reasons = [str(score) if isinstance(score, Exception) else None for score in scores]
        if log_extra is not None and any(reasons):
            log_extra("reason", reasons)
        unreadable = [case for case in cases if isinstance(case, UnreadableReference)]
        warn_of_unreadable(unreadable, column=self.tests, option="tests", reward=self)
        if lost := [score for score in scores if isinstance(score, SandboxUnavailable)]:
            warnings.warn(
                f"could not run the programs of {len(lost)} of {len(texts)} completions, whose rows get no reward. "
                f"First cause: {lost[0]}",
                stacklevel=2,
            )
        return [math.nan if isinstance(score, Exception) else score for score in scores]

    def _score(self, text: str, tests: Sequence[Any] | UnreadableReference) -> float | Exception | None:
        """Return the share of tests that a program passes, or the reason why there is none."""
        if isinstance(tests, UnreadableReference):
            return tests
        if not tests:
            return None
        program = code_of(text)
        if program is None:
            return 0.0
        passed = 0
        try:
            for test in tests:
                if self._passes(program, test):
                    passed += 1
                elif not self.partial:
                    return 0.0
        except SandboxUnavailable as error:
            return error
        return passed / len(tests)

    def _passes(self, program: str, test: Any) -> bool:
        if isinstance(test, Mapping):
            result = self.sandbox.run(program, str(test["input"]))
            return result.ok and _lines(result.stdout) == _lines(str(test["output"]))
        end = secrets.token_hex(16)  # proves that the tests ran to the end
        result = self.sandbox.run(f"{program}\n{test}\nprint({os.linesep + end!r})")
        return result.ok and result.stdout.rstrip().endswith(end)


def code_of(text: str) -> str | None:
    """Return the last Python code block of a text, else its last code block, else None.

    Example:
        >>> code_of("Like this:" + chr(10) + "```python" + chr(10) + "print(4)" + chr(10) + "```")
        'print(4)'
    """
    blocks = [(language.lower(), code) for language, code in BLOCK.findall(text)]
    python = [code for language, code in blocks if language in ("python", "py", "python3")]
    return (python or [code for _, code in blocks] or [None])[-1]


def _read(tests: Any, entry_point: Any) -> list[Any] | UnreadableReference:
    """Return the tests of a row, an empty list if the reward does not apply, or the parse error."""
    try:
        return [] if tests is None else [_check(test, entry_point) for test in _list_of(tests)]
    except UnreadableReference as error:
        return error


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
        if not listed or len(inputs) != len(outputs) or tests.get("fn_name"):
            raise UnreadableReference(
                'expected as many "inputs" as "outputs", read and printed by a program without "fn_name", got '
                f"{tests!r:.200}"
            )
        return [{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)]
    return tests if isinstance(tests, list | tuple) else [tests]


def _check(test: Any, entry_point: Any) -> Any:
    """Return a test in the form in which it runs.

    Raises:
        UnreadableReference: If the value is not a test.
    """
    if isinstance(test, str):
        return _check_code(test, entry_point)
    if isinstance(test, Mapping) and all(isinstance(test.get(key), str | Real) for key in ("input", "output")):
        return test
    raise UnreadableReference(
        f'expected a test to be code or a mapping with strings "input" and "output", got {test!r:.200}'
    )


def _check_code(test: str, entry_point: Any) -> str:
    try:
        body = ast.parse(test, TEST_FILE).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableReference(f"expected a test to be Python, got {test!r:.200}: {error}") from error
    if not all(_defines(statement) for statement in body):
        return test
    checks = any(isinstance(statement, ast.FunctionDef) and statement.name == "check" for statement in body)
    if checks and isinstance(entry_point, str) and entry_point.isidentifier():
        return f"{test}\ncheck({entry_point})"
    raise UnreadableReference(
        f"expected a test to run something, such as an assert, got definitions only, which any program passes: "
        f"{test!r:.200}; a function named check needs the column {ENTRY_POINT!r} with the name of the function to check"
    )


def _defines(statement: ast.stmt) -> bool:
    """Return True if a statement tests nothing: a definition, an import, or an expression without a call."""
    if isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign):
        return not any(isinstance(part, ast.Call) for part in ast.walk(statement))
    return isinstance(statement, DEFINITIONS)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
