"""Code: the share of tests that a program out of a completion passes, in a sandbox."""

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lightning_rl.arguments import check_bools, check_counts
from lightning_rl.rewards.sandbox import Sandbox
from lightning_rl.rewards.text import column_of, text_of

BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTests:
    """Runs the last block of Python of each completion against the tests of its row.

    A test is a mapping with ``"input"``, what the program reads, and ``"output"``, what it has to print, where white
    space at the ends of lines and of the whole does not count; or a string, code such as ``assert f(2) == 4`` that
    runs after the program and in it. A program that wants to deceive the latter can: use inputs and outputs where that
    matters. A completion without a block of code passes nothing; ``None`` as tests: does not apply.

    Args:
        tests: the column with a list of tests for each row.
        sandbox: where programs run, each test in a new one.
        partial: whether passing some tests is worth their share, or nothing.
        parallel: how many programs run at the same time.

    Raises:
        SandboxUnavailable: if this machine cannot lock programs up.
        ValueError: if an option is out of range.
    """

    tests: str = "tests"
    sandbox: Sandbox = Sandbox()  # noqa: RUF009  frozen
    partial: bool = True
    parallel: int = 2

    def __post_init__(self) -> None:  # noqa: D105
        check_counts(1, parallel=self.parallel)
        check_bools(partial=self.partial)
        self.sandbox.check()

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """The share of tests that each completion passes.

        Raises:
            ValueError: if there is no such column, or a test is none.
        """
        del prompts  # a program is judged by its tests alone
        column = column_of(columns, self.tests, option="tests", reward=self)
        cases = [None if tests is None else [_check(test) for test in tests] for tests in column]
        with ThreadPoolExecutor(self.parallel) as pool:
            return list(pool.map(self._score, map(text_of, completions), cases))

    def _score(self, text: str, tests: Sequence[Any] | None) -> float | None:
        if not tests:
            return None
        program, passed = code_of(text), 0
        for test in tests if program is not None else ():
            if self._passes(str(program), test):
                passed += 1
            elif not self.partial:
                return 0.0
        return passed / len(tests)

    def _passes(self, program: str, test: Any) -> bool:
        if isinstance(test, Mapping):
            result = self.sandbox.run(program, str(test["input"]))
            return result.ok and _lines(result.stdout) == _lines(str(test["output"]))
        end = secrets.token_hex(16)  # so that a program that ends by itself has passed nothing
        result = self.sandbox.run(f"{program}\n{test}\nprint({os.linesep + end!r})")
        return result.ok and result.stdout.rstrip().endswith(end)


def code_of(text: str) -> str | None:
    """The last block of Python in a text, or the last block at all; None without one.

    Example:
        >>> code_of("Like this:" + chr(10) + "```python" + chr(10) + "print(4)" + chr(10) + "```")
        'print(4)'
    """
    blocks = [(language.lower(), code) for language, code in BLOCK.findall(text)]
    python = [code for language, code in blocks if language in ("python", "py", "python3")]
    return (python or [code for _, code in blocks] or [None])[-1]


def _check(test: Any) -> Any:
    if isinstance(test, str) or (isinstance(test, Mapping) and {"input", "output"} <= test.keys()):
        return test
    raise ValueError(f'expected a test to be code or a mapping with "input" and "output", got {test!r:.200}')


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
