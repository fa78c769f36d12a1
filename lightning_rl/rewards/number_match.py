r"""Reward for the number of the reference, compared exactly.

Numbers: digits of any script with thousands separators (after a marker also spaces), decimals (after a leading zero or
points between thousands also with a comma), sign, currency before and unit after; ``1.5 million``; scientific notation
(``1.5e3``, ``1.5 \times 10^3``) and powers (``2^10``); fractions (``3/4``, ``\frac{3}{4}``), mixed numbers (``1 3/4``)
and ``0.\overline{3}``. Numbers of more than 1000 digits are skipped.

Source: the answers of GSM8K, which end with ``#### 42``: Cobbe et al. 2021, arXiv:2110.14168.
"""

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Rational
from typing import Any

from typing_extensions import override

from lightning_rl.rewards.answer_match import AnswerMatch, UnreadableReference
from lightning_rl.rewards.measures import MULTIPLES, is_unit, unit_of
from lightning_rl.rewards.text import (
    AND_OR,
    GROUPS,
    MARKERS,
    SPAN,
    first_line,
    plain_text,
    stated_answer,
    with_decimal_points,
    without_spaces,
)
from lightning_rl.utils.arguments import check_numbers, check_texts

MAX_DIGITS = 1000

SEPARATOR = r"(?:'|,(?:\\!)?|\{,\}|\\,|[\u00a0\u2009\u202f])"
GROUP = rf"{SEPARATOR}[0-9]{{3}}"
INTEGER = rf"(?:(?!0)[0-9]{{1,3}}(?:{GROUP})+(?!{GROUP}|[0-9])|[0-9]++)"
COMMA = r"(?:(?<![0-9.,(\[{])0(?:,|\{,\})[0-9]++(?![.,)\]}]?[0-9)\]}]))"  # 0,5 is no thousand, (0,5) is a pair
DECIMAL = rf"(?:{COMMA}|{INTEGER}(?:\.[0-9]++)?|(?<![0-9A-Za-z_.])\.[0-9]++)"
NUMERAL = r"(?:\{\s*+[-+]?" + DECIMAL + r"\s*+\}|[0-9])"
CURRENCY = r"(?:\\?[$\u20ac\u00a3\u00a5\u20b9]\s?)"
OUTSIDE = r"(?<![0-9A-Za-z_^])(?<!\^\{)(?<!\^-)(?<!\^\{-)(?<!_\{)"  # not part of a name, exponent or index
POWER_OF = r"\^\s*+\{?\s*+"
NUMBER = re.compile(
    rf"""
    (?:(?<![0-9A-Za-z_)\]}}])(?P<sign>[-+]))?
    (?:{CURRENCY}(?P<inner_sign>-)?)?
    {OUTSIDE}
    (?:
        (?:(?P<whole>{INTEGER})(?:\s*+(?=\\[dtc]?frac)|\s++(?=[0-9])))?
        (?:
            \\[dtc]?frac\s*+(?P<latex_top>{NUMERAL})\s*+(?P<latex_bottom>{NUMERAL})
          | (?<!/)(?P<top>{DECIMAL})\s*+/\s*+(?P<bottom>{DECIMAL})(?!\s*+/\s*+[0-9])
        )
      | (?P<decimal>{DECIMAL})
        (?:
            [eE](?P<exponent>[-+]?[0-9]++)(?![0-9A-Za-z_])
          | \s*+\\times\s*+10\s*+{POWER_OF}(?P<ten>[-+]?[0-9]++)\s*+\}}?
          | \s*+{POWER_OF}(?P<power>[-+]?[0-9]++)\s*+\}}?
        )?
    )
    (?:\s*+(?:\\?%|percent\b)|[\s~\\]*+(?:(?:text|mathrm)\s*+\{{\s*+)?(?P<multiple>{"|".join(MULTIPLES)})s?\b)?
    """,
    re.VERBOSE,
)
BEFORE = re.compile(  # a number is part of a formula, range, bound or time
    r"(?:(?:<|(?<![-=])>)\s*|\\(?!text|math|mbox|left|quad|display)[A-Za-z]+\s*(?:\[[^]]*\])?\s*(?:\\left)?[{(]?\s*"
    r"|(?<![A-Za-z\\])[A-Za-z]+\(|\||[\w)}\]]\s*(?:[-+/^_]|(?<=[0-9]):|\*(?!\*))\s*)$"
)
BOUND = re.compile(r"(?:<|(?<![-=])>|\\[lgn]e)\s*$")
WORDS_BEFORE_FORMULA = re.compile(r"^[^0-9\\$]+(?=\$[^$]*\$|\\\[|\\\()")
ARITHMETIC = re.compile(r"(?:[0-9.,()\[\]{}\s*+/^$-]|\\(?:times|cdot|left|right))+")
AFTER = re.compile(
    r"\s*(?:\\(?!text|math|mbox|right|quad|circ)[A-Za-z]+|\^(?!\s*\{?\s*\\circ)|[_>]|<(?!/)|[-+*/:]\s*(?:[0-9(\\]|[A-Za-z]\b))"
)
FACTOR = re.compile(r"(?P<word>[ap]\.m\.?|[A-Za-z]+|\s+[A-Za-z](?=\s*[-+^=]))(?P<sum>\s*[-+]\s*[0-9])?")
FACTORIAL = re.compile(r"!(?<=[0-9)]!)(?=\s*[$}/\\])")
DECORATION = re.compile(
    r"(?:\\(?:text|math|mbox|quad)\w*|\^\s*\{?\s*\\circ|[\s$*~){}\[\]]|\\(?!text|math|mbox|quad|circ))+"
)
NAME = r"(?: ?[A-Za-z](?:_?[0-9])? ?=)?"
OR = rf"(?:{AND_OR}|y|o|e|\u0438|lor|vee)"
UNIT = r"(?:[^\W\d_]+ |%)?,? ?"
SEVERAL = re.compile(
    rf"|{UNIT}{OR}{NAME}|{UNIT}\(? ?or(?: [a-z]+){{0,2}}|{UNIT}[~\u2013\u2014-]"
    rf"|(?:[,;&/|~\u2013\u2014-]|\.\.+|vs\.?|and/or){NAME}"
)
ALTERNATIVE = re.compile(UNIT + r"(?:or|oder|ou)(?: [a-z]+){0,2}" + NAME + r"|[\u2013\u2014]")  # codespell:ignore oder
NOT = re.compile(r"\bnot\W*$", re.IGNORECASE)
SPACING = re.compile(r"\\(?:text|mathrm|mbox)|(?<!,)\\[,;! ](?![0-9]{3})")
FORMULA = re.compile(r"[-+*=^_<>\\]")


@dataclass(frozen=True, kw_only=True)
class NumberMatch(AnswerMatch):
    r"""Number reward: 1 if a completion states the number of the reference, else 0.

    The last marker decides: the stated number is the first in the line after it (after the ``=`` in ``x = 42`` and ``6
    * 7 = 42``, before it in ``42 = 6 * 7``), else the last number after it. A part of a formula (``3\sqrt{2}``), range
    or time is no number, nor are several different values (``5 or 6``, ``5, 6``). Without a marker it is the last
    number of the completion. A brace that is not closed states no number. Units and percent signs are ignored. Numbers
    are compared as fractions, without rounding: 42, 42.0 and 84/2 are equal, 0.3333 and 1/3 are not.

    Args:
        answer: Name of the column with the references: numbers, texts with one number, whole answers of GSM8K, or lists
            of them.
        after: See :class:`AnswerMatch`.
        tag: See :class:`AnswerMatch`.
        markers: Strings that precede an answer, case-insensitive; after one that ends with a brace, the text in braces.
        strict: Score a completion 0 unless a number is in the line after its last marker.
        rel_tol: Tolerance relative to the reference.
        abs_tol: Absolute tolerance; the larger of the two counts, as in :func:`math.isclose`.

    Raises:
        ValueError: If a tolerance is negative or not finite.

    Example:
        >>> NumberMatch()(["?"] * 3, ["It is $1,042.00.", "42 or 43", "#### 1042"], answer=["... #### 1042"] * 3)
        [1.0, 0.0, 1.0]
    """

    markers: tuple[str, ...] = MARKERS
    strict: bool = False
    rel_tol: float = 0.0
    abs_tol: float = 0.0

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_texts(markers=self.markers)
        check_numbers(at_least=0, finite=True, rel_tol=self.rel_tol, abs_tol=self.abs_tol)

    @override
    def score(self, text: str, reference: Any) -> float:
        wanted = self.number_of_reference(reference)
        stated = self.number_of_text(text)
        if stated is None or not (self.abs_tol or self.rel_tol):
            return float(stated == wanted)
        return float(abs(stated - wanted) <= max(_exact(self.abs_tol), _exact(self.rel_tol) * abs(wanted)))

    def number_of_text(self, text: str) -> Fraction | None:
        """Return the number that a completion states; None if there is none or it has more than 1000 digits."""
        text = FACTORIAL.sub(r"\\factorial", plain_text(text)).replace(r"\approx", "=")
        stated = stated_answer(text, self.markers)
        line = "" if stated is None else with_decimal_points(without_spaces(first_line(stated)))
        line = WORDS_BEFORE_FORMULA.sub("", line).replace("=>", "->")
        numbers = list(NUMBER.finditer(line))
        if numbers:
            return _stated_value(line, numbers)
        text = with_decimal_points(text if stated is None else stated)
        return None if self.strict else _last_value(without_spaces(text) if GROUPS.fullmatch(text.strip()) else text)

    def number_of_reference(self, reference: Any) -> Fraction:
        """Return the number of the reference.

        Raises:
            UnreadableReference: If the reference is neither a number nor a text with one number or a marked number.
        """
        number = isinstance(reference, Rational | float | Decimal) and not isinstance(reference, bool)
        if number and (isinstance(reference, Rational) or math.isfinite(reference)):
            return _exact(reference)
        if isinstance(reference, str):
            text = plain_text(reference).replace(r"\approx", "=")
            stated = stated_answer(text, self.markers)
            for part in (text,) if stated is None else (first_line(stated), stated):
                value = self._only_number(re.sub("^- +", "-", without_spaces(SPACING.sub(" ", part))))
                if value is not None:
                    return value
        raise UnreadableReference(f"expected a number, or a text with one number, got {reference!r:.200}")

    def _only_number(self, text: str) -> Fraction | None:
        """Return the only number of a text, or after its equals sign; None if there are others or a formula."""
        right = _right_side(text)
        matches = list(NUMBER.finditer(right))
        if len(matches) != 1 or FORMULA.search(right[: matches[0].start()]):
            return None
        rest = right[matches[0].end() :]
        if FORMULA.search(rest) and not is_unit(rest, apart=True):
            return None
        return _stated_value(text, list(NUMBER.finditer(text)))


def _exact(number: Rational | float | Decimal) -> Fraction:
    """Return the decimal value of a float as printed: 0.1 is one tenth."""
    return Fraction(repr(number)) if isinstance(number, float) else Fraction(number)


def _right_side(span: str) -> str:
    """Return the text after the last equals sign that follows a formula rather than words."""
    left, equals, right = span.rpartition("=")
    return right if equals and not re.search(r"[A-Za-z]{2}", re.sub(r"\\[A-Za-z]+", "", left)) else span


def _stated_value(line: str, numbers: list[re.Match[str]]) -> Fraction | None:
    """Return the first number after the last equals sign; None if it is part of a formula or one of several values."""
    begin = len(line) - len(_right_side(line))
    left = line[:begin].rstrip("= ").rpartition("=")[2].strip("= $")
    index = next(
        (n for n, number in enumerate(numbers) if number.start() >= begin and not NOT.search(line[: number.start()])),
        None,
    )
    if index is None:
        return None
    number, value = numbers[index], value_of(numbers[index])
    rest = line[number.end() :]
    part = BEFORE.search(line[begin : number.start()]) or AFTER.match(rest) or _is_factor(FACTOR.match(rest))
    near = numbers[max(index - 1, 0) : index + 2]
    different = any(one is not number and value_of(one) != value and _is_list(line, number, one) for one in near)
    equated = NUMBER.fullmatch(left)  # the 4 of "4 = 5", the 15 of "15 = 3 * 5"
    if part and equated and ARITHMETIC.fullmatch(line, begin):
        return value_of(equated)
    return None if part or different or (equated and value_of(equated) != value) else value


def _is_factor(match: re.Match[str] | None) -> bool:
    """Return True for letters behind a number that are no unit, as in 15k, or are part of a sum."""
    if match is None or match["word"] in ("st", "nd", "rd", "th"):  # codespell:ignore nd
        return False
    return bool(match["sum"]) or match["word"] in ("B", "K", "M") or not is_unit(match["word"].strip(), apart=True)


def _is_list(text: str, one: re.Match[str], other: re.Match[str]) -> bool:
    """Return True for two values such as ``5 or 6``, ``5 km, 6 km`` and ``5 hours 6 minutes``."""
    between = _between(text, one, other)
    unit, after = between.removesuffix(","), DECORATION.sub(" ", text[other.end() :]).lstrip()
    return bool(
        SEVERAL.fullmatch(between) or (unit.isalpha() and unit_of(unit) and (unit == between or after.startswith(unit)))
    )


def _between(text: str, one: re.Match[str], other: re.Match[str]) -> str:
    """Return the text between two numbers without decoration."""
    first, last = sorted((one, other), key=lambda number: number.start())
    return " ".join(DECORATION.sub(" ", text[first.end() : last.start()]).split()).replace(" ,", ",")


def _last_value(text: str) -> Fraction | None:
    before = last = None
    for number in NUMBER.finditer(text):
        before, last = last, number
    if (
        last is None
        or BOUND.search(text[max(0, last.start() - SPAN) : last.start()])
        or (before and value_of(before) != value_of(last) and ALTERNATIVE.fullmatch(_between(text, before, last)))
    ):
        return None
    return value_of(last)


def value_of(match: re.Match[str]) -> Fraction | None:
    """Return the value of a match; None for too many digits or a division by zero."""
    if len(match.group()) > MAX_DIGITS:
        return None
    top, bottom = match["latex_top"] or match["top"], match["latex_bottom"] or match["bottom"]
    divisor = _decimal(bottom) if bottom else 1
    value = None if not divisor else _decimal(top) / divisor if top else _power(match)
    if value is None:
        return None
    if match["multiple"]:
        value *= MULTIPLES[match["multiple"]]
    if match["whole"]:
        value += _decimal(match["whole"])
    return -value if "-" in (match["sign"], match["inner_sign"]) else value


def _power(match: re.Match[str]) -> Fraction | None:
    """Return a decimal number with its exponent of ten, or a power."""
    value, digits = _decimal(match["decimal"]), len(match["decimal"])
    exponent = match["exponent"] or match["ten"]
    if exponent:
        return value * Fraction(10) ** int(exponent) if abs(int(exponent)) <= MAX_DIGITS else None
    if not match["power"]:
        return value
    power = int(match["power"])
    return value**power if abs(power) * digits <= MAX_DIGITS and (value or power >= 0) else None


def _decimal(numeral: str) -> Fraction:
    if numeral.isdigit():
        return Fraction(int(numeral))
    numeral = re.sub(r"^0(?:,|\{,\})", "0.", numeral)
    return Fraction(re.sub(r"[^0-9.+-]", "", numeral))
