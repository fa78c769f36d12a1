r"""The answer in a text of mathematics: its formula, and what math-verify does not compare.

math-verify drops units, the base of a numeral and text in several words. So they are read and compared here, where the
reference and the answer have both.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rl.rewards.answer_match import UnreadableReference
from lightning_rl.rewards.text import MARKERS, SPAN, stated_answer

TAIL = 4000  # last characters of a text that are read
SYMBOLS = ("####", r"\boxed{", r"\fbox{")  # markers that beat words such as "answer is"
WORDS = tuple(marker for marker in MARKERS if marker not in SYMBOLS)
DELIMITERS = ("$", r"\(", r"\[", r"\boxed")
WHOLE = re.compile(r"\$\$([^$]*)\$\$|\$([^$]*)\$|\\\(((?:(?!\\\)).)*)\\\)|\\\[((?:(?!\\\]).)*)\\\]", re.DOTALL)
BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<token>[^\s{}$\\]+))")
TEXT = r"\\(?:text(?:bf|it|rm|tt)?|math(?:rm|bf)|mbox)\s*\{([^{}]*)\}"
POWER = r"(?:\s*\^\s*\{?(?P<power>[23])\}?)?"
UNIT_TEXT = re.compile(rf"(?P<rest>.*\S)\s*{TEXT}{POWER}")
UNIT_WORDS = re.compile(rf"(?P<rest>.*[0-9}})\]])(\s*[A-Za-z][A-Za-z. /]*){POWER}")
BASE = re.compile(r"(?P<digits>[0-9A-Fa-f,]+)\s*_\s*\{?\s*(?P<base>[0-9]+|[a-z]+)\s*\}?")
MODULUS = re.compile(r"\s*(?:\(\s*)?\\?[bp]?mod(?:ulo)?\b\s*\{?\s*(?P<modulus>[0-9A-Za-z]+)\s*\}?\s*\)?$")
CONJUNCTION = re.compile(r"\s*(?:\\text\{\s*(?:and|or)\s*\}|(?<=\s)(?:and|or)(?=\s))\s*")
DECIMAL_COMMA = re.compile(r"(?<![0-9.,(\[{\\])0(?:,|\{,\})(?=[0-9]+(?![0-9.,)\]}]))")
SCIENTIFIC = re.compile(
    r"(?<![0-9A-Za-z.])([0-9]+\.[0-9]+(?=[eE][-+]?[0-9])|[0-9]+(?=[eE](?:[0-9]|[-+][0-9]{2})))[eE]([-+]?[0-9]{1,3})(?![0-9A-Za-z.])"
)
FUNCTION = re.compile(
    "(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|log|exp|sqrt|max|min|gcd|lcm|mod|deg|det|lim|inf|sup|alpha|beta|gamma|delta|"
    "epsilon|theta|lambda|sigma|omega|phi|psi|rho|tau"
)
NUMBER_WORD = re.compile(
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|"
    "(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand|million|and"
)
PLACEHOLDERS = frozenset({"n/a", "na", "nan", "null"})
MULTIPLES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
UNITS = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimetre",
        "cm centimeter centimetre",
        "m meter metre",
        "km kilometer kilometre",
        "in inch inche",
        "ft foot feet",
        "yd yard",
        "mile mi",
        "mg milligram",
        "g gram",
        "kg kilogram",
        "oz ounce",
        "lb pound",
        "ml milliliter millilitre",
        "liter litre l",
        "gallon gal",
        "second sec s",
        "minute min",
        "hour hr h",
        "day",
        "week",
        "month",
        "year yr",
        "degree",
        "radian rad",
        "dollar usd",
        "cent",
        "euro",
    )
    for name in names.split()
}


@dataclass(frozen=True)
class Answer:
    """Answer in a text.

    Attributes:
        latex: What math-verify parses.
        words: The answer in lower case, if it is words and not mathematics.
        unit: Names of the unit of measure, if they are known.
        modulus: Modulus of a congruence.
        base: Base of a numeral.
    """

    latex: str = ""
    words: str | None = None
    unit: tuple[str, ...] | None = None
    modulus: str | None = None
    base: str | None = None

    def contradicts(self, reference: "Answer") -> bool:
        """Return True if the unit, modulus or base is stated and is not that of the reference."""
        mine, other = (self.unit, self.modulus, self.base), (reference.unit, reference.modulus, reference.base)
        return any(given and wanted and given != wanted for given, wanted in zip(mine, other, strict=True))


def answer_of_reference(reference: Any) -> Answer:
    """Return the answer of a reference: a number, a formula, words, or a whole solution with its last marker.

    Raises:
        UnreadableReference: If it is something else, such as a number in words.
    """
    if isinstance(reference, float) and not math.isfinite(reference):
        raise UnreadableReference(f"expected a number or formula, got {reference!r}")
    text = _tidy(str(reference)[-TAIL:])
    marked = stated_answer(text, SYMBOLS)
    answer = _read(text if marked is None else _first_lines(marked))
    if answer.words is not None and all(map(NUMBER_WORD.fullmatch, re.findall(r"\w+", answer.words))):
        raise UnreadableReference(f"expected a number in digits, got {reference!r:.200}")
    if (answer.words or answer.latex.strip("$ ")).casefold() in PLACEHOLDERS:
        raise UnreadableReference(f"expected a number or formula, or None where there is none, got {reference!r:.200}")
    return answer


def answers_of_text(text: str, *, commas: bool, bare: bool = False) -> list[Answer]:
    r"""Return the possible readings of the answer in a completion.

    The last ``\boxed{}`` or ``####`` decides. Without them it is what follows the last "answer is" or "answer:", or
    what math-verify finds in the text.

    Args:
        text: Completion.
        commas: True if the reference has commas; otherwise ``0,5`` is a decimal.
        bare: True if a text without a marker may be a formula alone, such as the text of a tag.
    """
    text = _tidy(text[-TAIL:])
    if not commas:
        text = DECIMAL_COMMA.sub("0.", text)
    marked = stated_answer(text, SYMBOLS)
    if marked is not None:
        return [_read(_first_lines(marked))]
    stated = stated_answer(text, WORDS)
    if stated is not None:
        return [_read(re.split(r"\n|\.(?:\s|$)", stated[:SPAN])[0]), Answer(text)]
    alone = _read(text) if len(text) <= SPAN else Answer()
    return [alone, Answer(text)] if bare or alone.words or alone.unit else [Answer(text)]


def _tidy(text: str) -> str:
    r"""Return the text with its boxes as ``\boxed{``, and without escaped dollars and thin spaces in numbers."""
    text = text.replace(r"\$", "").replace(r"\!", "")
    text = re.sub(r"(?<=[0-9])(?:\\,|\{,\})(?=[0-9]{3}(?![0-9]))", ",", text)
    text = BOX.sub(lambda box: r"\boxed{" + (box["token"] + "}" if box["token"] else ""), text)
    return re.sub(r"\$[^$]*\$", lambda formula: formula.group().replace("\n", " "), text)


def _first_lines(answer: str) -> str:
    r"""Return the first line, and further ones while a brace, bracket or ``\begin`` is open."""
    lines = answer.split("\n")
    for number in range(1, len(lines)):
        first = "\n".join(lines[:number])
        opened = sum(map(first.count, ("{", "(", "[", r"\begin")))
        if opened <= sum(map(first.count, ("}", ")", "]", r"\end"))):
            return first
    return answer


def _read(answer: str) -> Answer:
    """Return an answer from the text that states it and nothing else."""
    answer = answer.replace("\n", " ").strip("*\t ").rstrip(".,; ")
    whole = WHOLE.fullmatch(answer)
    answer = next(filter(None, whole.groups()), "").strip() if whole else answer
    answer = answer.replace("$", "") if answer.count("$") == 1 else answer
    answer = SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", answer)
    if any(mark in answer for mark in DELIMITERS):
        return Answer(answer)
    plain = " ".join(re.sub(r"\\[,;: ]|~", " ", re.sub(TEXT, r" \1 ", answer)).split())
    if modulus := MODULUS.search(plain):
        return Answer(f"${plain[: modulus.start()]}$", modulus=modulus["modulus"])
    if base := BASE.fullmatch(plain):
        return Answer(f"${base['digits']}$", base=base["base"])
    if measured := _measure(answer):
        return measured
    if _is_words(plain) or (len(plain) > 1 and plain.isalpha() and re.fullmatch(TEXT, answer)):
        return Answer(words=plain.casefold())
    return Answer(f"${CONJUNCTION.sub(', ', answer)}$")


def _measure(answer: str) -> Answer | None:
    """Return a quantity without its unit, if the answer is one."""
    match = UNIT_TEXT.fullmatch(answer) or UNIT_WORDS.fullmatch(answer)
    if match is None or not re.search(r"[0-9]|\\(?!text)", match["rest"]):
        return None
    names = re.findall(r"[a-z]+|/", match[2].casefold())
    if match.re is UNIT_WORDS and not _is_unit(names, apart=match[2][:1].isspace()):
        return None
    rest = match["rest"]
    if names and names[0] in MULTIPLES:
        rest, names = rf"{rest} \cdot 10^{{{MULTIPLES[names[0]]}}}", names[1:]
    return Answer(f"${rest}$", unit=_unit(names, match["power"]))


def _is_unit(names: Sequence[str], *, apart: bool) -> bool:
    """Return True if words after a number are no product of variables."""
    known = any(name in UNITS and len(name) > 1 for name in names)
    return not any(map(FUNCTION.fullmatch, names)) and (known or (apart and any(len(name) > 2 for name in names)))


def _unit(names: Sequence[str], power: str | None) -> tuple[str, ...] | None:
    """Return the known names of a unit, the power last; None if one is unknown."""
    exponents = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
    power = next((exponents[name] for name in names if name in exponents), power)
    names = ["mile", "/", "hour"] if list(names) == ["mph"] else [name for name in names if name not in exponents]
    known = [
        UNITS.get(name) or UNITS.get(name.removesuffix("s")) or ("/" if name in ("/", "per") else None)
        for name in names
    ]
    return None if not known or None in known else (*(name for name in known if name), power or "")


def _is_words(plain: str) -> bool:
    if re.search(r"[\\=^_{}<>+*/|]", plain) or CONJUNCTION.search(plain):
        return False
    names = re.findall(r"[^\W\d_]+", plain.casefold())
    return any(len(name) > 2 or name == "no" for name in names) and not any(map(FUNCTION.fullmatch, names))
