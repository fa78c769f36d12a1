r"""Reward for the number of the reference, compared exactly.

Numbers: digits of any script with thousands separators, decimals (after a leading zero also with a comma), sign,
currency before and unit after; scientific notation (``1.5e3``, ``1.5 \times 10^3``) and powers (``2^10``); fractions
(``3/4``, ``\frac{3}{4}``) and mixed numbers (``1 3/4``). Numbers of more than 1000 digits are skipped.

Source: the answers of GSM8K, which end with ``#### 42``: Cobbe et al. 2021, arXiv:2110.14168.
"""

import math
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational
from typing import Any

from typing_extensions import override

from lightning_rl.rewards.answer_match import AnswerMatch, UnreadableReference
from lightning_rl.rewards.text import MARKERS, first_line, stated_answer
from lightning_rl.utils.arguments import check_numbers, check_texts

MAX_DIGITS = 1000

SEPARATOR = r"(?:,(?:\\!)?|\{,\}|\\,|[\u00a0\u2009\u202f])"
GROUP = rf"{SEPARATOR}[0-9]{{3}}"
INTEGER = rf"(?:(?!0)[0-9]{{1,3}}(?:{GROUP})+(?!{GROUP}|[0-9])|[0-9]++)"
COMMA = r"(?:(?<![0-9.,(\[{])0(?:,|\{,\})[0-9]++(?![.,)\]}]?[0-9)\]}]))"  # 0,5 is no thousand, (0,5) is a pair
DECIMAL = rf"(?:{COMMA}|{INTEGER}(?:\.[0-9]++)?|(?<![0-9A-Za-z_.])\.[0-9]++)"
NUMERAL = r"(?:\{\s*+[-+]?" + DECIMAL + r"\s*+\}|[0-9])"
CURRENCY = r"(?:\\?[$\u20ac\u00a3\u00a5\u20b9]\s?)"
OUTSIDE = r"(?<![0-9A-Za-z_^])(?<!\^\{)(?<!\^-)(?<!\^\{-)(?<!_\{)"  # not part of a name, exponent or index
POWER_OF = r"(?:\^|\*\*)\s*+\{?\s*+"
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
          | \s*+(?:\\times|\\cdot|[x*\u00d7\u00b7])\s*+10\s*+{POWER_OF}(?P<ten>[-+]?[0-9]++)\s*+\}}?
          | \s*+{POWER_OF}(?P<power>[-+]?[0-9]++)\s*+\}}?
        )?
    )
    (?:\s*+(?:\\?%|percent\b))?
    """,
    re.VERBOSE,
)
LETTERS = {"\u2212": "-", "\ufe63": "-", "\uff0d": "-", "\u2044": "/", "\u2215": "/", "\uff0f": "/"}
LETTERS |= {"\uff0c": ",", "\uff0e": ".", "\uff05": "%", "\uff04": "$"}
BEFORE = re.compile(  # a number is part of a formula, range or time
    r"(?:\\(?!text|math|mbox|left|quad)[A-Za-z]+\s*(?:\[[^]]*\])?\s*\{?|[\w)}\]]\s*(?:[-+/^_:]|\*(?!\*))\s*)$"
)
AFTER = re.compile(
    r"\s*(?:\\(?!text|math|mbox|right|quad|circ)[A-Za-z]+|\^(?!\s*\{?\s*\\circ)|_|[-+*/:]\s*(?:[0-9(\\]|[A-Za-z]\b))"
)
SPACING = re.compile(r"\\(?:text|mathrm|mbox)|(?<!,)\\[,;! ](?![0-9]{3})")
FORMULA = re.compile(r"[-+*=^_<>\\]")
SUPERSCRIPTS = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")


@dataclass(frozen=True, kw_only=True)
class NumberMatch(AnswerMatch):
    r"""Number reward: 1 if a completion states the number of the reference, else 0.

    The last marker decides: the stated number is the first in the line after it (after the ``=`` in ``x = 42`` and ``6
    * 7 = 42``), else the last number after it. A part of a formula (``3\sqrt{2}``), range or time is no number. Without
    a marker it is the last number of the completion. A brace that is not closed states no number. Percent signs are
    ignored. Numbers are compared as fractions, without rounding: 42, 42.0 and 84/2 are equal, 0.3333 and 1/3 are not.

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
        if stated is None:
            return 0.0
        room = max(_exact(self.abs_tol), _exact(self.rel_tol) * abs(wanted))
        return float(abs(stated - wanted) <= room)

    def number_of_text(self, text: str) -> Fraction | None:
        """Return the number that a completion states; None if there is none or it has more than 1000 digits."""
        text = _plain(text)
        stated = stated_answer(text, self.markers)
        line = "" if stated is None else _right_side(first_line(stated))
        if match := NUMBER.search(line):
            part = BEFORE.search(line[: match.start()]) or AFTER.match(line[match.end() :])
            return None if part else _value(match)
        return None if self.strict else _last_value(text if stated is None else stated)

    def number_of_reference(self, reference: Any) -> Fraction:
        """Return the number of the reference.

        Raises:
            UnreadableReference: If the reference is neither a number nor a text with one number or a marked number.
        """
        number = isinstance(reference, Rational | float) and not isinstance(reference, bool)
        if number and (isinstance(reference, Rational) or math.isfinite(reference)):
            return _exact(reference)
        if isinstance(reference, str):
            text = _plain(reference)
            stated = stated_answer(text, self.markers)
            for part in (text,) if stated is None else (first_line(stated), stated):
                value = self._only_number(SPACING.sub(" ", _right_side(part)))
                if value is not None:
                    return value
        raise UnreadableReference(f"expected a number, or a text with one number, got {reference!r:.200}")

    def _only_number(self, text: str) -> Fraction | None:
        """Return the number of a text with exactly one number and no formula around it, else None."""
        matches = list(NUMBER.finditer(text))
        if len(matches) != 1 or FORMULA.search(text[: matches[0].start()] + text[matches[0].end() :]):
            return None
        return _value(matches[0])


def _exact(number: Rational | float) -> Fraction:
    """Return the decimal value of a float as printed: 0.1 is one tenth."""
    return Fraction(repr(number)) if isinstance(number, float) else Fraction(number)


def _plain(text: str) -> str:
    """Return the text with digits of other scripts, fraction characters, minus signs etc. in ASCII."""
    if text.isascii():
        return text
    text = SUPERSCRIPTS.sub(lambda run: f"^{{{unicodedata.normalize('NFKC', run.group())}}}", text)
    return text.translate({ord(letter): plain for letter in set(text) if (plain := _letter(letter)) is not None})


def _letter(letter: str) -> str | None:
    if letter.isascii():
        return None
    digit = unicodedata.decimal(letter, None)
    if digit is not None:
        return str(digit)
    kind, *codes = unicodedata.decomposition(letter).split() or [""]
    if kind == "<fraction>":
        plain = "".join(chr(int(code, 16)) for code in codes).replace("\u2044", "/")
        return f" {plain}" if plain[-1] != "/" else None
    return LETTERS.get(letter)


def _right_side(span: str) -> str:
    """Return the text after the last equals sign that follows a formula rather than words."""
    left, equals, right = span.rpartition("=")
    return right if equals and not re.search(r"[A-Za-z]{2}", re.sub(r"\\[A-Za-z]+", "", left)) else span


def _last_value(text: str) -> Fraction | None:
    last = None
    for last in NUMBER.finditer(text):  # noqa: B007  the last match counts
        pass
    return None if last is None else _value(last)


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the value of a match; None for too many digits or a division by zero."""
    if len(match.group()) > MAX_DIGITS:
        return None
    top, bottom = match["latex_top"] or match["top"], match["latex_bottom"] or match["bottom"]
    value = _ratio(top, bottom) if top else _power(match)
    if value is None:
        return None
    if match["whole"]:
        value += _decimal(match["whole"])
    return -value if "-" in (match["sign"], match["inner_sign"]) else value


def _ratio(top: str, bottom: str) -> Fraction | None:
    divisor = _decimal(bottom)
    return _decimal(top) / divisor if divisor else None


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
    numeral = re.sub(r"^0(?:,|\{,\})", "0.", numeral)
    return Fraction(re.sub(r"[^0-9.+-]", "", numeral))


def numbers_in(text: str) -> Iterator[Fraction | None]:
    """Yield the numbers of a text in order; None for one that cannot be parsed.

    Example:
        >>> [str(number) for number in numbers_in("-$1,234.50, 3/4 of 1e2")]
        ['-2469/2', '3/4', '100']
    """
    return (_value(match) for match in NUMBER.finditer(_plain(text)))
