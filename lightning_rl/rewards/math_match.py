"""Reward for mathematically equivalent answers, by math-verify.

math-verify sets its time limit by a signal, which works only in a main thread, and sympy can hang on a short formula.
So separate processes compare, which any thread and any process can start.
"""

import logging
import math
import re
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, lru_cache
from numbers import Real
from typing import Any

import cloudpickle
from typing_extensions import override

from lightning_rl.processes.errors import LOADING, CallError
from lightning_rl.processes.pool import Pool
from lightning_rl.rewards.answer_match import AnswerMatch, UnreadableReference, warn_of_unreadable
from lightning_rl.rewards.optional_imports import require
from lightning_rl.utils.arguments import check_counts, check_numbers

MEMORY = 2 * 2**30  # bytes of a process
MARKER, TAIL = "####", 4000
PATIENCE = 20.0  # multiple of the limit after which a process that uses no CPU time is killed
DELIMITERS = ("$", r"\boxed", r"\(", r"\[")
PLAIN = re.compile(r"\$-?[0-9]{1,3}(?:(?:,[0-9]{3}){1,2}|[0-9]{0,6})(?:\.[0-9]{1,6})?\$")


@dataclass(frozen=True, kw_only=True)
class MathMatch(AnswerMatch):
    r"""Math reward: 1 if a completion is mathematically equivalent to the reference, else 0.

    Of a completion, math-verify reads the last 4000 characters, or the text after the last ``####`` in them, and looks
    for ``\boxed{}``, formulas between dollar signs and numbers. If either number is rounded, both are compared to six
    decimals. 9% equals both 9 and 0.09.

    A comparison that takes more than ``timeout`` seconds of CPU time scores 0, so the load of the machine changes no
    score. The processes start at the first call and end with this object.

    Args:
        answer: Name of the column with the references: numbers, LaTeX, or whole answers of GSM8K.
        timeout: Limit of CPU time of one completion in seconds.
        processes: Number of processes that compare at the same time.

    Raises:
        ImportError: If math-verify is not installed.
        ValueError: If an option is not positive.
    """

    timeout: float = 5.0
    processes: int = 2

    def __post_init__(self) -> None:
        """Check the options."""
        require("math_verify", extra="math")
        super().__post_init__()
        check_counts(1, processes=self.processes)
        check_numbers(above=0, finite=True, timeout=self.timeout)

    @cached_property
    def pool(self) -> Pool:
        """Processes that compare, started on demand."""
        return Pool(cloudpickle.dumps(Comparison()), processes=self.processes, memory=MEMORY)

    @override
    def compare(self, texts: Sequence[str], references: Sequence[Any]) -> list[float | None]:
        readable = [_is_mathematics(reference) for reference in references]
        rows = [row for row, fine in enumerate(readable) if fine]
        questions = [self.question(texts[row], references[row]) for row in rows]
        values: list[float | None] = [None] * len(texts)
        for row, answer in zip(rows, self._answers(questions), strict=True):
            values[row] = math.nan if answer is None else float(answer)
        for row, reference in enumerate(references):
            if reference is not None and not readable[row]:
                values[row] = math.nan
        unreadable = [
            UnreadableReference(f"expected a number or formula, got {reference!r:.200}")
            for value, reference in zip(values, references, strict=True)
            if value is not None and math.isnan(value)
        ]
        warn_of_unreadable(unreadable, column=self.answer, option="answer", reward=self)
        return values

    def _answers(self, questions: Sequence[tuple[str, str]]) -> list[bool | None]:
        """Return the results of the comparisons; plain numbers are compared here."""
        answers = [_same_number(*question) for question in questions]
        rest = [number for number, answer in enumerate(answers) if answer is None]
        futures = [self._submit(*questions[number]) for number in rest]
        for number, future in zip(rest, futures, strict=True):
            answers[number] = _answer(future)
        return answers

    def _submit(self, reference: str, text: str) -> "Future[bool | None]":
        question = [part.encode(errors="replace").decode() for part in (reference, text)]  # without lone surrogates
        task = ((*question, self.timeout), {})
        return self.pool.submit(cloudpickle.dumps(task), PATIENCE * self.timeout)

    @override
    def score(self, text: str, reference: Any) -> float:
        value = self.compare([text], [reference])[0]
        return math.nan if value is None else value

    def question(self, text: str, reference: Any) -> tuple[str, str]:
        """Return the parts of reference and text that are compared."""
        text, marked, stated = text[-TAIL:].rpartition(MARKER)
        return _formula(str(reference)[-TAIL:].rpartition(MARKER)[2]), _formula(stated) if marked else stated


def _is_mathematics(reference: Any) -> bool:
    """Return True if a reference is a string or a number."""
    return isinstance(reference, str | Real | Decimal) and not isinstance(reference, bool)


def _formula(text: str) -> str:
    """Return the text between dollar signs, unless it marks formulas; else math-verify reads only numbers."""
    text = text.strip()
    return text if not text or any(mark in text for mark in DELIMITERS) else f"${text}$"


def _same_number(reference: str, text: str) -> bool | None:
    """Compare two numbers like math-verify; return None unless both are plain and short.

    With up to nine digits and six decimals, neither rounding nor float conversion changes the result.
    """
    if PLAIN.fullmatch(reference) and PLAIN.fullmatch(text):
        return Decimal(reference.strip("$").replace(",", "")) == Decimal(text.strip("$").replace(",", ""))
    return None


def _answer(future: "Future[bool | None]") -> bool | None:
    """Return the result of a comparison; False if it failed or exceeded its time or memory.

    Raises:
        RuntimeError: If no process can start.
    """
    try:
        return future.result()
    except CallError as error:
        if error.kind == LOADING:
            raise RuntimeError(
                f"expected a process that imports math_verify to start, got {error.message}: run "
                f"{sys.executable} -c 'import math_verify' to see why"
            ) from error
        return False


class Comparison:
    """Function that compares, built when it is loaded."""

    def __reduce__(self) -> Any:
        """Pickle as a call of a nested function, by value: the processes import math-verify and nothing else."""
        return _builder(), ()


def _builder() -> Callable[[], Callable[[str, str, float], bool | None]]:
    def build() -> Callable[[str, str, float], bool | None]:
        from math_verify import parse, verify

        logging.disable()

        @lru_cache(maxsize=1024)
        def parse_reference(reference: str) -> list[Any]:
            return parse(reference, parsing_timeout=0)

        def compare(reference: str, text: str, seconds: float) -> bool | None:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # ends the process, because sympy catches exceptions
            try:
                wanted = parse_reference(reference)
                return verify(wanted, parse(text, parsing_timeout=0), timeout_seconds=0) if wanted else None
            except (RecursionError, MemoryError, ArithmeticError, ValueError, TypeError):
                return False
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)

        compare("$x+1$", "so $1+x$", 60.0)  # loads the parser
        return compare

    return build
