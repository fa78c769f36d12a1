"""Reward for mathematically equivalent answers, by math-verify.

math-verify sets its time limit by a signal, which works only in a main thread, and sympy can hang on a short formula.
So separate processes compare, which any thread and any process can start.
"""

import logging
import math
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, lru_cache
from numbers import Real
from typing import Any

import cloudpickle
from typing_extensions import override

from lightning_rl.processes.errors import LOADING, CallError
from lightning_rl.processes.pool import Pool
from lightning_rl.rewards.answer_match import AnswerMatch, UnreadableReference, references_in, warn_of_unreadable
from lightning_rl.rewards.math_reading import answer_of_reference, answers_of_text
from lightning_rl.rewards.optional_imports import require
from lightning_rl.utils.arguments import check_counts, check_numbers

MEMORY = 2 * 2**30  # bytes of a process
PATIENCE = 20.0  # multiple of the limit after which a process that uses no CPU time is killed
PLAIN = re.compile(
    r"\$(?P<sign>-?)(?:(?P<number>(?:[1-9][0-9]{0,2}(?:,[0-9]{3}){1,2}|[0-9]{1,9})(?:\.[0-9]{1,6})?)"
    r"|\\[dt]?frac\{(?P<top>[0-9]{1,9})\}\{(?P<bottom>[1-9][0-9]{0,8})\})\$"
)


@dataclass(frozen=True, kw_only=True)
class MathMatch(AnswerMatch):
    r"""Math reward: 1 if a completion is mathematically equivalent to the reference, else 0.

    The last ``\boxed{}`` or ``####`` in the last 4000 characters decides, and a box that is not closed is no answer.
    Without them it is the text after the last "answer is" or "answer:", or the formulas between dollar signs and
    numbers that math-verify finds. If either number is rounded, both are compared to six decimals, and a smaller
    number than .001 to four digits. 9% equals both 9 and 0.09. Units, currencies, moduli, bases of numerals and letters
    of choices are compared where both have one, and units are not converted. Words that are no known unit, such as
    apples, equal each other and no known unit. An answer with several different values equals no reference of one
    value. A reference in words, such as "Friday", has to be equal to the answer.

    A comparison that takes more than ``timeout`` seconds of CPU time scores 0, so the load of the machine changes no
    score. The processes start at the first call and end with this object.

    Args:
        answer: Name of the column with the references: numbers, LaTeX, whole answers of GSM8K, choices with letter and
            value such as ``\textbf{(D)}\ 7``, of which either is right, or a list of them.
        after: See :class:`AnswerMatch`.
        tag: See :class:`AnswerMatch`.
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
        return Pool(cloudpickle.dumps(MathComparison()), processes=self.processes, memory=MEMORY)

    @override
    def compare(self, texts: Sequence[str], references: Sequence[Any]) -> list[float | None]:
        values: list[float | None] = [None if reference is None else math.nan for reference in references]
        questions, rows, failures = list[tuple[str, str]](), list[int](), dict[int, UnreadableReference]()
        for row, (text, reference) in enumerate(zip(texts, references, strict=True)):
            for one in () if reference is None else references_in(reference):
                try:
                    pairs = _questions(text, one, bare=bool(self.after or self.tag))
                except UnreadableReference as error:
                    failures[row], pairs = error, []
                questions += pairs
                rows += [row] * len(pairs)
        for row, answer in zip(rows, self._answers(questions), strict=True):
            if answer is not None:
                values[row] = float(answer or values[row] == 1)
        unreadable = [
            failures.get(row) or UnreadableReference(f"expected a number or formula, got {references[row]!r:.200}")
            for row, value in enumerate(values)
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


def _questions(text: str, reference: Any, *, bare: bool) -> list[tuple[str, str]]:
    """Return the formulas that math-verify compares: of the reference, and of each reading of the text.

    Raises:
        UnreadableReference: If the reference is not mathematics.
    """
    if not isinstance(reference, str | Real | Decimal) or isinstance(reference, bool):
        raise UnreadableReference(f"expected a number or formula, got {reference!r:.200}")
    wanted = answer_of_reference(reference)
    given = answers_of_text(text, commas=re.search(r",|\\pm|\u00b1", str(reference)) is not None, bare=bare)
    if any(answer.text and answer.text == wanted.text for answer in given):
        return [("$1$", "$1$")]
    if wanted.words is not None:
        return [("$1$", "$1$" if any(answer.words == wanted.words for answer in given) else "$0$")]
    if any(answer.contradicts(wanted) for answer in given):
        return [(wanted.latex, "")]
    pairs = ((value, answer.formulas(wanted)) for answer in given for value in wanted.values(answer))
    return [(value, formula) for value, formulas in pairs for formula in formulas] or [(wanted.latex, "")]


def _same_number(reference: str, text: str) -> bool | None:
    """Compare two numbers like math-verify; return None unless both are plain and short.

    With up to nine digits and six decimals, neither rounding nor float conversion changes the result. Fractions are
    compared with integers and fractions, because math-verify rounds a fraction that it compares with a decimal.
    """
    numbers = [PLAIN.fullmatch(reference), PLAIN.fullmatch(text)]
    if not all(numbers) or (r"frac{" in reference + text and "." in reference + text):
        return None
    first, second = (
        Fraction(number["sign"] + (number["number"] or number["top"]).replace(",", "")) / int(number["bottom"] or 1)
        for number in filter(None, numbers)
    )
    return first == second


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


class MathComparison:
    """Function that compares, built when it is loaded."""

    def __reduce__(self) -> Any:
        """Pickle as a call of a nested function, by value: the processes import math-verify and nothing else."""
        return _builder(), ()


def _builder() -> Callable[[], Callable[[str, str, float], bool | None]]:
    parser, comparer = _parser(), _comparer()

    def build() -> Callable[[str, str, float], bool | None]:
        logging.disable()
        parse, same = lru_cache(maxsize=1024)(parser()), comparer()

        def compare(reference: str, text: str, seconds: float) -> bool | None:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # ends the process, because sympy catches exceptions
            try:
                wanted = parse(reference)
                return same(wanted, parse(text)) if wanted else None
            except (RecursionError, MemoryError, ArithmeticError, ValueError, TypeError):
                return False
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)

        compare("$x+1$", "so $1+x$", 60.0)  # loads the parser
        return compare

    return build


def _parser() -> Callable[[], Callable[[str], list[Any]]]:
    def build() -> Callable[[str], list[Any]]:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
        from sympy import I

        keep_units = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
        formula = [LatexExtractionConfig(normalization_config=keep_units), ExprExtractionConfig()]

        def with_imaginary_unit(part: Any) -> Any:
            names = {symbol: I for symbol in getattr(part, "free_symbols", ()) if symbol.name == "i"}
            return part.xreplace(names) if names else part

        def read(text: str) -> list[Any]:
            one = text.startswith("$") and text.find("$", 1) == len(text) - 1
            parts = parse(text, formula, parsing_timeout=0) if one else parse(text, parsing_timeout=0)
            return [with_imaginary_unit(part) for part in parts]

        return read

    return build


def _comparer() -> Callable[[], Callable[[list[Any], list[Any]], bool]]:
    def build() -> Callable[[list[Any], list[Any]], bool]:
        from math_verify import verify
        from sympy import FiniteSet, Integer, Set, Tuple, floor, log

        def numbers_in(formula: Any) -> Iterator[Any]:
            if getattr(formula, "is_number", False):
                yield formula
            else:
                for part in getattr(formula, "args", ()):
                    yield from numbers_in(part)

        def same(wanted: list[Any], given: list[Any]) -> bool:
            sizes = [abs(number.evalf(5)) for number in numbers_in(wanted[0])]
            smallest = min((size for size in sizes if size.is_positive), default=Integer(1))
            digits = max(6, 3 - int(floor(log(smallest, 10))))

            def equal(value: Any) -> bool:
                return verify(wanted, value, digits, 9 + digits, allow_set_relation_comp=True, timeout_seconds=0)

            values = given[0].args if given and isinstance(given[0], FiniteSet) else ()
            several = isinstance(wanted[0], Set | Tuple) or len(values) < 2
            return equal(given) or (not several and all(map(equal, values)))

        return same

    return build
