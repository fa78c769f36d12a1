"""Reward for code: share of unit tests that the generated program passes in a sandbox."""

import math
import re
import secrets
import textwrap
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lightning_rl.rewards.answer_match import UnreadableReference, warn_of_unreadable
from lightning_rl.rewards.code_cases import ENTRY_POINT, METADATA, AnyOf, Test, read_tests
from lightning_rl.rewards.sandbox import Sandbox, SandboxUnavailable
from lightning_rl.rewards.sandbox_service import SandboxService
from lightning_rl.rewards.text import column_of, texts_of
from lightning_rl.utils.arguments import check_counts, check_text

BLOCK = re.compile(
    r"^(?:(?!```|~~~)[^\n])*(`{3,}+|~{3,}+)([^\n`]*+)((?:\n.*?)??)(?:\n[ \t]*\1|\1?\Z)", re.DOTALL | re.MULTILINE
)
PYTHON = re.compile(r"\W*(python[\d.]*|py\d?)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTests:
    """Share of tests that the last Python code block of a completion passes.

    A completion without a code block scores 0. A row whose tests are None gets None. A test is one of these:

    * a mapping with ``"input"`` (stdin) and ``"output"`` (expected stdout), each a text or a list of lines. Trailing
      whitespace of lines and of the whole is ignored;
    * such a mapping that also names a function, as ``"fn_name"``, in its ``"metadata"`` as ``"func_name"``, or by the
      ``"type"`` ``function_call`` or ``functional`` and the column ``entry_point`` or ``metadata``: the function, or
      the method of ``class Solution``, is called with the input, a list of arguments, one per line in JSON, or a
      mapping of keywords, and has to return the output;
    * a string of code such as ``assert f(2) == 4`` that runs after the program in the same process. Its functions
      ``test...()`` and classes of unittest are run too, by pytest if they need it, as with fixtures or parameters;
      and its function ``check``, as in HumanEval, with ``candidate``, the function that the column ``entry_point``
      names, such as ``f`` or ``Solution().f``. A program can cheat such tests, so use the other kinds where that
      matters.

    Numbers that are decimal fractions have the tolerance of ``numpy.allclose``, and a printed 2.0 is 2. Keys of an
    argument that are all integers as text, as JSON has them, may be integers. A program under a call or code is a
    module that is imported, by tests as ``solution`` or another name in ``code_driver.NAMES``: its ``__name__`` is not
    ``"__main__"``, and it scores 0 if it reads stdin, exits or raises without asking for that.

    The tests of a row are a list of tests, a single test, a mapping of lists ``{"inputs": [...], "outputs": [...]}``
    with or without ``"fn_name"``, one of CodeContests (``{"input": [...], "output": [...]}``, also under
    ``public_tests``, ``private_tests`` and ``generated_tests``), or JSON of one of these. A row with other tests or
    keys, invalid Python, an output above the sandbox's limit, or code that tests nothing or needs a module, a fixture
    or, beside ``candidate``, a name that it does not have, gets NaN, is left out of training and is counted as failed;
    a warning shows the first, and the file of failed samples has each as ``reason``.

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

    @property
    def columns_read(self) -> dict[str, str]:
        """Options by the columns that they name."""
        return {self.tests: "tests"}

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
        names, metadata = (columns.get(name, [None] * len(texts)) for name in (ENTRY_POINT, METADATA))
        limit = self.sandbox.output
        cases = [read_tests(*row, max_output=limit) for row in zip(column, names, metadata, strict=True)]
        with ThreadPoolExecutor(self.parallel) as pool:
            scores = list(pool.map(self._score, texts, cases))
        reasons = [str(score) if isinstance(score, Exception) else None for score in scores]
        if log_extra is not None and any(reasons):
            log_extra("reason", reasons)
        unreadable = [score for score in scores if isinstance(score, UnreadableReference)]
        warn_of_unreadable(unreadable, column=self.tests, option="tests", reward=self)
        if lost := [score for score in scores if isinstance(score, SandboxUnavailable)]:
            warnings.warn(
                f"could not run the programs of {len(lost)} of {len(texts)} completions, whose rows get no reward. "
                f"First cause: {lost[0]}",
                stacklevel=2,
            )
        return [math.nan if isinstance(score, Exception) else score for score in scores]

    def _score(self, text: str, tests: Sequence[Test] | UnreadableReference) -> float | Exception | None:
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
        except (SandboxUnavailable, UnreadableReference) as error:
            return error
        return passed / len(tests)

    def _passes(self, program: str, test: Test) -> bool:
        if isinstance(test, AnyOf):
            return any(self._passes(program, reading) for reading in test.tests)
        mark = secrets.token_hex(16)  # which the program does not know
        source, stdin = test.program(program, mark)
        result = self.sandbox.run(source, stdin)
        return result.ok and test.accepts(result.stdout, mark)


def code_of(text: str) -> str | None:
    """Return the last Python code block of a text, else its last code block, else None.

    Example:
        >>> code_of("Like this:" + chr(10) + "```python" + chr(10) + "print(4)" + chr(10) + "```")
        'print(4)'
    """
    blocks = BLOCK.findall(text.rstrip())
    python = [block for block in blocks if PYTHON.match(block[1])]
    return textwrap.dedent((python or blocks)[-1][2][1:]) if blocks else None
