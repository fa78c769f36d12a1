r"""The answer in a text of mathematics: its formula, and what math-verify does not compare.

math-verify drops units, the base of a numeral and text in several words. So they are read and compared here, where the
reference and the answer have both.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from lightning_rl.rewards.answer_match import UnreadableReference
from lightning_rl.rewards.measures import CURRENCIES, MULTIPLES, Unit, is_unit, unit_of
from lightning_rl.rewards.text import (
    AND_OR,
    BULLET,
    MARKERS,
    SPAN,
    plain_text,
    stated_answer,
    with_decimal_points,
    without_spaces,
)

TAIL = 4000  # last characters of a text that are read
SYMBOLS = ("####", r"\boxed{", r"\fbox{")  # markers that beat words such as "answer is"
WORDS = tuple(marker for marker in MARKERS if marker not in SYMBOLS)
DELIMITERS = ("$", r"\(", r"\[", r"\boxed")
WHOLE = re.compile(r"\$\$([^$]*)\$\$|\$([^$]*)\$|\\\(((?:(?!\\\)).)*)\\\)|\\\[((?:(?!\\\]).)*)\\\]", re.DOTALL)
BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<token>[^\s{}$\\]+))")
TEXT = r"\\(?:text|math|operatorname)[a-z]*\s*\{([^{}]*)\}|\\mbox\s*\{([^{}]*)\}"
SPACE = re.compile(r"(?<!\\)\\[,;: ]|~|\\q?quad\b")
MIXED = re.compile(r"(?<![0-9./^_{])([0-9]+) +([0-9]{1,2}) ?/ ?([0-9]{1,2})(?![0-9/])")
COUNTS = re.compile(r"(?<![A-Za-z\\])C_\{?([0-9]+)\}?\^\{?([0-9]+)\}?")
TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
DEGREES = re.compile(r"([0-9.]+)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})")
CHOICE = re.compile(
    r"([({\s]*(?:\\(?:text|math)[a-z]*\s*\{\s*)?\(?\s*([A-J])(?=[\s}]*\)|\s*[.:][\s}])[)}\s.:]*)(?=[^\s)}])"
)
UNIT_TEXT = r"\\(?:text|math)[a-z]*\s*\{[^{}0-9]*\}"
PIECE = (
    r"\\(?:text|math|operatorname)[a-z]*\s*\{(?:\^-?[0-9]|[^{}0-9])*\}|\\mbox\s*\{[^{}0-9]*+\}"
    r"|\^\s*(?:\{\s*\\circ\s*\}|\\circ\b|\{\s*-?[0-9]\s*\}|-?[0-9])|\\(?:circ|degree|cdot|times|Omega|mu)\b|\\?%"
    r"|[A-Za-z\u00b5\u03bc\u03a9\u2126\u00a2]++\.?|[/\u00b7()\s" + CURRENCIES + "]"
)
MEASURE = re.compile(rf"(?P<rest>.*?(?:[0-9}})\]]|\\pi|\\infty))(?P<unit>(?!\s*\^\s*\{{?\s*-?[0-9])(?:{PIECE})+)")
RANGE = re.compile("(?<=[0-9])\\s*[\u2013\u2014]\\s*(?=\uff04?[0-9])")
UNIT_FRACTION = re.compile(rf"\\[dt]?frac\s*\{{\s*({UNIT_TEXT})\s*\}}\s*\{{\s*({UNIT_TEXT}(?:\^\{{?[0-9]\}}?)?)\s*\}}")
CURRENCY = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:\\text\w*\s*\{{)?\s*(?P<unit>(?:US)?[{CURRENCIES}]|\\pounds|\\euro|(?:USD|EUR|GBP|JPY|INR|CNY|Rs)\b\.?)"
    r"[\s}]*(?=[-0-9.\\])(?P<rest>.+)"
)
VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z]*\s*=)|[\u3040-\ud7a3]")
BARE = re.compile(r"(\\[lgn]e|<|(?<![-=])>)\s*[0-9.]*[0-9]|[0-9.]+\s*\\(?:cdot|times)\s*10\^(?:\{-?[0-9]+\}|[0-9])")
BASE = re.compile(r"(?P<digits>[0-9A-Fa-f,]+)\s*_\s*\{?\s*(?P<base>[0-9]+|[a-z]+)\s*\}?")
MODULUS = re.compile(r"\s*(?:\(\s*)?\\?[bp]?mod(?:ulo)?\b\s*\{?\s*(?P<modulus>[0-9A-Za-z]+)\s*\}?\s*\)?$")
CONJUNCTION = re.compile(
    rf"\s*,?\s*(?:\\(?:lor|vee|land|wedge)\b|\\text\{{\s*(?:{AND_OR})(?:\s+[a-z]+)?\s*\}}|(?<=[\s)}}])(?:{AND_OR})(?=[\s$]))\s*",
    re.IGNORECASE,
)
SCIENTIFIC = re.compile(r"(?<![0-9A-Za-z.])([0-9]+(?:\.[0-9]+)?|\.[0-9]+)[eE]([-+]?[0-9]{1,3})(?![0-9A-Za-z]|\.[0-9])")
NUMERAL = r"-?(?:[0-9.,/]+|\\[dt]?frac\s*(?:\{[0-9]+\}|[0-9])\s*(?:\{[0-9]+\}|[0-9]))"
EQUATED = re.compile(rf"((?:^|=)\s*{NUMERAL}\s*)=(?=\s*{NUMERAL}\s*$)")  # different numbers, as in 4 = 5
SEPARATOR = re.compile(r"(?<=[0-9])\s*(?:\||~|\bvs\b\.?|\band/or\b)\s*(?=-?[0-9])")
REALS = r"\\in\s*\\(?:mathbb|mathbf|Bbb)\s*\{?\s*R\s*\}?\s*"
BUILDER = re.compile(rf"\\?\{{\s*[a-z]\s*(?:{REALS})?(?:\||:|\\mid\b|\\vert\b|\\colon\b)(.*?)\\?\}}")
INEQUALITY = re.compile(
    r"(?:(?P<low>[^<>=,]+?)\s*(?P<above><|\\leq?\b)\s*)?[a-z]\s*(?P<sign>[<>]|\\[lg]eq?\b)\s*(?P<bound>[^<>=,]+)"
)
LIST = re.compile(r"[0-9.]+ [a-z]+(?:(?:, and|,| and) [0-9.]+ [a-z]+)+")  # 5 apples, 6 pears
FUNCTION = re.compile(
    "(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|log|exp|sqrt|max|min|gcd|lcm|mod|deg|det|lim|inf|sup|alpha|beta|gamma|delta|"
    "epsilon|theta|lambda|sigma|omega|phi|psi|rho|tau"
)
PROSE = re.compile(
    rf"{TEXT}|(?<![-+*/=<>^_]\s)(?<![^\s(,;:])(?!(?:{AND_OR}|{FUNCTION.pattern})\b)"
    r"(?P<word>[^\W\d_]{3,}|is|it|in|as|at|by|we|of|so|if|be|no|on)(?:['\u2019][a-z]+)?(?![^\s.,;:!?)])(?!\s*[-+*/^=_<>])"
)
NUMBER_WORD = re.compile(
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|"
    "(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand|million|and"
)
PLACEHOLDERS = frozenset({"n/a", "na", "nan", "null"})


@dataclass(frozen=True)
class Answer:
    """Answer in a text.

    Attributes:
        latex: What math-verify parses.
        words: The answer in lower case, if it is words and not mathematics.
        unit: Unit of measure; empty for words that are no known unit, and None without words.
        modulus: Modulus of a congruence.
        base: Base of a numeral.
        letter: Letter of a choice before its value, as in ``(D) 7``.
        text: The answer as it is written, without spaces.
        product: The answer with its unit, if that may be a variable, as in ``5 m``.
    """

    latex: str = ""
    words: str | None = None
    unit: Unit | None = None
    modulus: str | None = None
    base: str | None = None
    letter: str | None = None
    text: str = ""
    product: str = ""

    def contradicts(self, reference: "Answer") -> bool:
        """Return True if the unit, modulus, base or letter is stated and is not that of the reference."""
        pairs = (
            (self.unit, reference.unit),
            (self.modulus, reference.modulus),
            (self.base, reference.base),
            (self.letter, reference.letter),
        )
        return any(given is not None and wanted is not None and given != wanted for given, wanted in pairs)

    def values(self, other: "Answer") -> list[str]:
        """Return the formulas that may equal the other answer, which may lack the letter, percent sign or degree."""
        scale = SCALES.get(self.unit) if self.unit and other.unit is None else None
        letter = f"${self.letter}$" if self.letter and not other.letter else ""
        product = self.product if other.unit is None else ""
        scaled = f"$({self.latex.strip('$')}) {scale}$" if scale else ""
        return list(filter(None, (self.latex, scaled, letter, product)))

    def formulas(self, reference: "Answer") -> list[str]:
        """Return the formulas that may equal a reference: :meth:`values`, or the value of a numeral with a base."""
        if self.base is not None and reference.base is None:
            return [f"${_in_base(self.latex.strip('$'), self.base)}$"]
        return self.values(reference)


SCALES = {unit_of("percent"): r"\cdot \frac{1}{100}", unit_of("degree"): r"\cdot \frac{\pi}{180}"}


def answer_of_reference(reference: Any) -> Answer:
    """Return the answer of a reference: a number, a formula, words, or a whole solution with its last marker.

    Raises:
        UnreadableReference: If it is something else, such as a number in words.
    """
    if isinstance(reference, float) and not math.isfinite(reference):
        raise UnreadableReference(f"expected a number or formula, got {reference!r}")
    text = _tidy(str(reference)[-TAIL:])
    stated = _read_statement(text)
    answer = _read(text) if stated is None else stated
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
    if not bare:
        text = BULLET.sub("", text)
    if not commas:
        text = with_decimal_points(text)
    stated = _read_statement(text)
    if stated is not None:
        alone = stated.latex or re.search(r"\bnot\b.*[0-9]", stated.words or "")
        return [stated] if alone else [stated, _read_last(text)]
    line = _strip_delimiters(text)
    if len(text) <= SPAN and (bare or _measure(line) or not (_prose(line) or VARIABLE.search(line))):
        alone = _sentence(text)
        return [alone] if alone.latex else [alone, _read_last(text)]
    found, whole = _read_last(text), _read(text) if len(text) <= SPAN else None
    return [found, whole] if whole and whole.words else [found]


def _read_statement(text: str) -> Answer | None:
    """Return the answer behind the last marker; None if there is no marker."""
    marked = stated_answer(text, SYMBOLS)
    if marked is not None:
        return _sentence(_first_lines(marked))
    stated = stated_answer(text, WORDS)
    if stated is None:
        return None
    answer = _sentence(re.split(r"\n|\.(?:\s|$)", stated[:SPAN])[0])
    return replace(answer, unit=answer.unit or None)  # words of a sentence are no unit


def _read_last(text: str) -> Answer:
    """Return what math-verify finds in a text without a marker: the last formula or number."""
    line = _strip_delimiters(next((line for line in reversed(text.split("\n")) if re.search("[0-9]", line)), ""))
    numbers = list(re.finditer(rf"[{CURRENCIES}]?[0-9][0-9.,]*", line))
    measured = _measure(line[numbers[-1].start() :]) if numbers else None
    text = re.sub(r"(?<![\w.$])(?:[a-z] ?= ?)?\$?([0-9.]+) or (?:[a-z] ?= ?)?\$?([0-9.]*[0-9])\b", r"$\1, \2$", text)
    if "$" not in text:
        text = BARE.sub(lambda part: f"${'x ' if part[1] else ''}{part[0]}$", text)
    return Answer(_without_currency(text), unit=(measured.unit or None) if measured else None)


def _tidy(text: str) -> str:
    r"""Return the text with its boxes as ``\boxed{``, in ASCII, and without thin spaces in numbers."""
    text = plain_text(text).replace(r"\$", "\uff04").replace(r"\!", "").replace(r"\varnothing", r"\emptyset")
    text = re.sub(r"=\s*[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])", lambda value: value.group().replace(",", ""), text)
    text = SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)
    text = re.sub(r"\\sqrt (?:([0-9]+)|\(([^()]*)\))", r"\\sqrt{\1\2}", text)
    text = re.sub(r"(?<![\w\\^)])[a-z]\s*=(?=[^=$\n,]*[0-9]\s*i\b)", "", text)  # z of a complex number
    text = re.sub(r"\\(?:mathbb|mathrm|operatorname)\s*\{Pr?\}|\\Pr\b", "P", text).replace("^{0.5}", "^{1/2}")
    text = re.sub(r"(?<=[0-9])(?:\\,|\{,\}|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))", ",", text)
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


def _strip_delimiters(answer: str) -> str:
    """Return an answer in one line without dollar signs around formulas and without decoration."""
    answer = " ".join(answer.replace("**", "").split())
    answer = re.sub(rf"^\$?(?:[-=]+>|\\(?:approx|simeq)\b|(?:{TEXT})\s*=)", "", answer)
    if re.fullmatch(r"(?:[^$]*\$(?=[0-9]))+[^$]*", answer):  # amounts of money, no formulas
        answer = answer.replace("$", "\uff04")
    answer = WHOLE.sub(lambda formula: next(filter(None, formula.groups()), "").strip(), answer)
    answer = re.sub(r"(?<=\\circ)(?=[A-Z])", " ", answer)
    answer = SPACE.sub(" ", answer.replace("$", "\uff04").replace("{:}", ":"))
    answer = answer if "=" in answer else RANGE.sub(" to ", answer)
    return re.sub(r"^(?=\\[lgn]e\b|[<>])", "x ", answer.strip("*\t :,=").rstrip(".,; "))  # a bound, as in "at least 4"


def _sentence(answer: str) -> Answer:
    """Return the answer of a text that states and perhaps explains it: the first value, or several joined by "or"."""
    answer = _strip_delimiters(answer)
    whole = _read(answer)
    words = _prose(answer)
    if whole.words is not None and not words and re.search("[0-9]", whole.words):
        answer = re.sub(TEXT, r"\1\2", answer)
        words = _prose(answer)
    if not words or whole.unit is not None or whole.letter:
        return whole
    begins = [0, *(word.end() for word in words)]
    ends = [*(word.start() for word in words), len(answer)]
    parts = [answer[begin:end] for begin, end in zip(begins, ends, strict=True)]
    for number, word in enumerate(words, 1):
        if word["word"] == "not":
            parts[number] = ""
    first = next((number for number, part in enumerate(parts) if re.search(r"[0-9]|\\[a-z]", part)), None)
    if first is None:
        return whole
    head, last = parts[first], first
    for word, part in zip(words[first:], parts[first + 1 :], strict=True):
        compound = unit_of(word["word"]) and re.match(r"\s*[0-9]", part)  # 10 hours 30 minutes
        if (
            not compound
            and not re.match(rf"\s*,?\s*(?:{AND_OR})\s+\S", part)
            and not re.search(r"(?:\s|\()or\s*$", head)
        ):
            break
        head, last = f"{head} , {part}", last + 1
    measured = None
    if last == first < len(words):
        clause = re.match(r"[^,;:(]*", answer[ends[first] :])
        measured = _measure(head + " ".join(clause.group().split()[:3])) if clause else None
    head = re.sub(rf"\s(?:{AND_OR})$", "", head.strip(" ,;:("))
    return replace(measured or _read(head), words=whole.words, text=whole.text)


def _prose(answer: str) -> list[re.Match[str]]:
    """Return the words of an answer that belong to no formula."""
    return [match for match in PROSE.finditer(answer) if match["word"]]


def _read(answer: str) -> Answer:
    """Return an answer from the text that states it and nothing else."""
    text = re.sub(r"\s", "", re.sub(TEXT, r"\1\2", _strip_delimiters(answer)))
    return replace(_parse(answer), text=text)


def _parse(answer: str) -> Answer:
    formulas = any(mark in answer for mark in DELIMITERS)
    solution, answer = answer, _strip_delimiters(answer)
    if r"\boxed" in answer or (formulas and _prose(answer) and not _measure(answer)):
        return Answer(_without_currency(solution))
    if choice := CHOICE.match(answer):
        return replace(_read(answer[choice.end() :]), letter=choice[2])
    text = re.fullmatch(TEXT, answer)
    if text and re.search("[0-9]", answer):
        answer = (text[1] or text[2]).strip()
    answer = SEPARATOR.sub(", ", EQUATED.sub(r"\1, ", answer))
    answer = MIXED.sub(r"\1\\frac{\2}{\3}", without_spaces(answer))
    answer = COUNTS.sub(r"\\binom{\1}{\2}", answer)
    plain = " ".join(re.sub(TEXT, r" \1\2 ", answer).split())
    if modulus := MODULUS.search(plain):
        return Answer(f"${plain[: modulus.start()]}$", modulus=modulus["modulus"])
    if base := BASE.fullmatch(plain):
        return Answer(f"${base['digits']}$", base=base["base"])
    if LIST.fullmatch(plain):
        return Answer(f"${re.sub('(?: and)? [a-z]+', '', plain)}$".replace(" ", ", ").replace(",,", ","), unit=())
    if measured := _measure(answer):
        return measured
    if _is_words(plain) or (len(plain) > 1 and plain.isalpha() and re.fullmatch(TEXT, answer)):
        return Answer(words=plain.casefold())
    if TRIGONOMETRY.search(answer):
        answer = DEGREES.sub(r"(\1 \\cdot \\frac{\\pi}{180})", answer)
    return Answer(f"${_without_currency(CONJUNCTION.sub(', ', _solution_set(answer)))}$")


def _solution_set(answer: str) -> str:
    """Return a set builder as its condition, and inequalities that "or" joins as a union of intervals."""
    builder = BUILDER.fullmatch(answer)
    answer = builder[1].strip() if builder else answer
    parts = [INEQUALITY.fullmatch(part.strip()) for part in re.split(r"\\lor|\\vee|\\text\{\s*or\s*\}|\bor\b", answer)]
    intervals = [_interval(part) for part in parts if part]
    return r" \cup ".join(intervals) if len(intervals) == len(parts) > 1 else answer


def _interval(inequality: re.Match[str]) -> str:
    r"""Return ``(1, 2]`` for ``1 < x \le 2``."""
    low, above, sign, bound = inequality.groups()
    if ">" in sign or "g" in sign:
        return f"{'(' if sign == '>' else '['}{bound}, \\infty)"
    low = low or r"-\infty"
    return f"{'(' if above in (None, '<') else '['}{low}, {bound}{')' if sign == '<' else ']'}"


def _measure(answer: str) -> Answer | None:
    """Return a quantity without its unit, if the answer is one."""
    answer = re.sub(r"\\mu\s*(\\(?:text|mathrm)\s*\{|(?=[A-Za-z]))", "\\1\u00b5", UNIT_FRACTION.sub(r"\1/\2", answer))
    names, rest = list[str](), answer
    if money := CURRENCY.fullmatch(answer):
        names, rest = [money["unit"]], money["sign"] + money["rest"]
    match = MEASURE.fullmatch(rest) if len(rest) <= SPAN else None
    words = re.sub(TEXT, r" \1\2 ", match["unit"]) if match else ""
    named = re.search(rf"[^\W\d_]|[%\u00a2{CURRENCIES}]", words)
    if match and named and re.search(r"[0-9]|\\(?!text)", match["rest"]) and not TRIGONOMETRY.search(match["rest"]):
        bare = re.sub(TEXT, " ", match["unit"])
        apart = not bare or bare[0].isspace() or bare[0] in "(/"
        number = bare.strip("/. ") == "" or not VARIABLE.search(match["rest"])
        if (
            number
            and is_unit(bare, apart=apart)
            and is_unit(words, apart=True)
            and not any(map(FUNCTION.fullmatch, words.replace("min", "").split()))
        ):
            rest, names = match["rest"], [*names, words]
    if not names:
        return None
    first = words.split()[0].casefold().rstrip("s") if words.split() else ""
    if first in MULTIPLES:
        rest = rf"{rest} \cdot {MULTIPLES[first]}"
    product = f"${answer}$" if match and re.fullmatch(r"\s*[A-Za-z]", match["unit"]) else ""
    latex = f"${_without_currency(CONJUNCTION.sub(', ', rest))}$"
    return Answer(latex, unit=unit_of(" ".join(names)), product=product)


def _without_currency(text: str) -> str:
    return re.sub(f"[{CURRENCIES}]", "", text)


def _in_base(digits: str, base: str) -> str:
    """Return the value of a numeral; empty if its base does not have its digits."""
    try:
        return str(int(digits.replace(",", ""), int(base)))
    except ValueError:
        return ""


def _is_words(plain: str) -> bool:
    if re.search(r"[\\=^_{}<>+*/|]", plain) or CONJUNCTION.search(plain):
        return False
    names = re.findall(r"[^\W\d_]+", plain.casefold())
    return any(len(name) > 2 or name == "no" for name in names) and not any(map(FUNCTION.fullmatch, names))
