"""Inputs of rewards: the text of a completion, a column of the data, and the answer in a text."""

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from lightning_rl.utils.arguments import check_rows
from lightning_rl.utils.naming import REWARD_ARGUMENTS, nearest

SENTENCES = (
    *("answer is", "answers are", "antwort ist", "antwort lautet", "antworten sind"),  # codespell:ignore ist
    *("respuesta es", "respuestas son", "r\u00e9ponse est", "r\u00e9ponses sont", "risposta \u00e8", "risposte sono"),
    *("resposta \u00e9", "respostas s\u00e3o", "\u043e\u0442\u0432\u0435\u0442 \u0440\u0430\u0432\u0435\u043d"),
)
MARKERS = (
    *("####", r"\boxed{", r"\fbox{", *SENTENCES),
    *dict.fromkeys(sentence.split()[0] + ":" for sentence in SENTENCES),
    *("\u7b54\u6848:", "\u7b54\u3048:", "\ub2f5:"),
    *("\u7b54\u6848\u662f", "\u7b54\u6848\u4e3a", "\u7b54\u6848\u5e94\u4e3a", "\u6545\u9009", "\u7b54\u3048\u306f"),
    "\ub2f5\uc740",
)
AND_OR = "or|and|to|by|oder|und|bis|ou|\u0438\u043b\u0438|\u6216|\u548c"  # between two values; codespell:ignore oder
SPAN = 200  # maximum length of the line with an answer
LETTERS = {"\u2212": "-", "\ufe63": "-", "\uff0d": "-", "\u2010": "-", "\u2011": "-", "\u2012": "-"}
LETTERS |= {"\u2044": "/", "\u2215": "/", "\uff0f": "/", "\uff0c": ",", "\uff0e": ".", "\uff05": "%", "\uff04": "$"}
LETTERS |= {"\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u2248": r"\approx ", "\u221a": r"\sqrt "}
LETTERS |= {"\u4e07": " wan ", "\u842c": " wan ", "\u4ebf": " yi ", "\u5104": " yi "}
LETTERS |= {"\u5143": " yuan ", "\u3002": ". "}
LETTERS |= {"\u221e": r"\infty ", "\u03c0": r"\pi ", "\u2205": r"\emptyset ", "\u222a": r"\cup ", "\u2229": r"\cap "}
LETTERS |= {"\u00b0": r"^\circ ", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u00b1": r"\pm "}
VALUE = r"(?=[-+]?\\?\$?\\?\(?\.?(?:[0-9]|\\[dt]?frac|\\sqrt|\\pi))"
OPENINGS = (r"[={(\[:#]", r"[={(\[]\s", r"[:#][ \t]", r"\bis ", r"[\s:]\$", r"\A\$")  # of an answer
OPENING = f"(?:{'|'.join(rf'(?<={opening})' for opening in OPENINGS)})"
BULLET = re.compile(rf"^(?<![={{(\[$]\n)[ \t]*- +{VALUE}", re.MULTILINE)
REWRITTEN = re.compile(r"<answer>|\"(?:final.)?answer\":?|[#*_ ]+(?:final )?answer[*_ ]*", re.IGNORECASE)
SCALE_WORDS = "more|greater|larger|higher|less|fewer|smaller|lower"
Rewriting = tuple[tuple[str, ...], re.Pattern[str], str | Callable[[re.Match[str]], str]]
BETWEEN_SCRIPTS = re.compile(r"(?<=[0-9])(?=[\u3040-\u9fff])|(?<=[\u3040-\u9fff])(?=[0-9])")
CONTINENTAL = re.compile(  # 1.234,56 and 1.234.567
    r"(?<![0-9.,(\[])([0-9]{1,3}\.[0-9]{3}(?=[.,])(?:\.[0-9]{3})*)(?:(?<=\..{3}\..{3})()|(,[0-9]++))(?![.,]?[0-9])"
)
DECIMAL_COMMA = re.compile(
    r"((?:(?<=boxed\{)|(?<![0-9.,(\[{]))(?:0|[0-9]+(?!(?:,|\{,\})[0-9]{3}(?![0-9]))))(?:,|\{,\})"
    r"(?=[0-9]+(?![.,]?[0-9]|\s*(?:[)\]]|\\\})))"
)
GROUPS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:(?: |~|\\ )[0-9]{3})+(?![0-9/])")  # 1 234 567
SUPERSCRIPTS = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")
OPEN_BOX = r"\\(?:boxed|fbox)\{"
LINKED_BOXES = re.compile(
    rf"({OPEN_BOX}(?:[^{{}}]|\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}})*)\}}\s*\$?\s*,?\s*"
    rf"(?:(?:{AND_OR})\s*\$?\s*{OPEN_BOX}|\$?\s*{OPEN_BOX}(?=[^{{}}]*\\text\{{ and \}}))"
)
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text


def text_of(completion: Any) -> str:
    """Return the text of a completion, which is a string or chat messages.

    Of chat messages it is the last answer, whose text parts are joined.

    Args:
        completion: Completion as passed to rewards.

    Returns:
        Text that the policy generated.

    Raises:
        ValueError: If it is neither, such as token ids.

    Example:
        >>> text_of("42"), text_of([{"role": "assistant", "content": "42"}])
        ('42', '42')
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and all(isinstance(message, Mapping) for message in completion):
        written = [message for message in completion if message.get("role", "assistant") == "assistant"]
        return _content_of(written[-1]) if written else ""
    kind = "token ids: pass tokenizer= to the module" if _is_ids(completion) else f"{completion!r:.200}"
    raise ValueError(f"expected a completion as text or as chat messages, got {kind}")


def _content_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:  # a message with tool calls only
        return ""
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise ValueError(f"expected the content of a message as text or as parts, got {content!r:.200}")


def _is_ids(completion: Any) -> bool:
    return isinstance(completion, Sequence) and all(isinstance(token, int) for token in completion)


def texts_of(completions: Sequence[Any]) -> list[str]:
    """Return the text of each completion.

    Raises:
        ValueError: If a completion is neither text nor chat messages, or the argument is not a list.
    """
    check_rows(len(completions), completions=completions)
    return [text_of(completion) for completion in completions]


def column_of(columns: Mapping[str, Any], name: str, rows: int, *, option: str, reward: object) -> Sequence[Any]:
    """Return a column of the data.

    Args:
        columns: Keyword arguments of a reward.
        name: Name of the column.
        rows: Number of rows.
        option: Option of the reward that names the column.
        reward: Reward that reads the column.

    Raises:
        ValueError: If the column is missing or does not have one value per row.
    """
    if name not in columns:
        present = sorted(columns.keys() - set(REWARD_ARGUMENTS))
        raise ValueError(
            f"expected a column {name!r} for {type(reward).__name__}({option}={name!r}), got the columns {present}: "
            f"add it to the data, or name another column with {option}={nearest(name, present)}"
        )
    check_rows(rows, **{name: columns[name]})
    return [plain_value(value) for value in columns[name]]


def plain_value(value: Any) -> Any:
    """Return a value with lists for arrays and with numbers of Python for those of numpy; a float keeps its digits.

    Example:
        >>> plain_value({"inputs": np.array([1, 2]), "limit": np.float32(0.1)})
        {'inputs': [1, 2], 'limit': 0.1}
    """
    if isinstance(value, np.floating):
        return float(str(value))
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim):
        return plain_value(value[()]) if isinstance(value, np.ndarray) else value.item()
    if isinstance(value, dict):
        return {key: plain_value(one) for key, one in value.items()}
    return [plain_value(one) for one in value] if isinstance(value, list | np.ndarray) else value


def ids_of(
    completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], *, reward: object
) -> Sequence[Sequence[int]]:
    """Return the token ids of the completions.

    Raises:
        ValueError: If their number is not that of the completions.
    """
    if len(completion_ids) != len(completions):
        raise ValueError(
            f"expected completion_ids of {len(completions)} completions for {type(reward).__name__}, which counts "
            f"tokens, got {len(completion_ids)}: pass completion_ids=, or choose another unit="
        )
    return completion_ids


def stated_answer(text: str, markers: Sequence[str] = MARKERS) -> str | None:
    r"""Return the text after the last marker; None if there is no marker.

    After a marker that opens a brace, the text in braces, which is empty if the brace is not closed. Boxes that only
    "and" or "or" joins are one box.

    Args:
        text: Text of a completion.
        markers: Strings that precede an answer, case-insensitive. Up to three words may stand in place of a space, as
            in ``answer to this is``, and a unit before a final colon, as in ``Answer (in cm):``.

    Example:
        >>> stated_answer("The answer is 4. #### 5"), stated_answer(r"It is \boxed{5} now"), stated_answer(r"\boxed{5")
        ('5', '5', '')
    """
    text = join_boxes(text) if r"\boxed{" in markers else text
    place = answer_place(text, _plain_markers(tuple(markers)))
    return None if place is None else text[place[1] : place[2]].lstrip(" \t\r\n*_:\uff1a").rstrip()


def join_boxes(text: str) -> str:
    """Return the text with boxes that only "and" or "or" separates as one box."""
    while r"\boxed{" in text and (joined := LINKED_BOXES.sub(r"\1 \\text{ and } ", text)) != text:
        text = joined
    return text


def answer_place(text: str, markers: Sequence[str] = MARKERS) -> tuple[int, int, int] | None:
    """Return where the last marker begins, and where the answer after it begins and ends; None without a marker.

    An answer in a brace that is not closed is empty.
    """
    lower, last = text.casefold(), None
    present = tuple(marker for word, marker in _first_words(tuple(markers)) if word in lower)
    for last in markers_pattern(present).finditer(text) if present else ():  # noqa: B007  the last one decides
        pass
    if last is None:
        return None
    length = len(_brace_content(text[last.end() :])) if last.group().endswith("{") else len(text) - last.end()
    return last.start(), last.end(), last.end() + length


def _rewriting(words: str, pattern: str, plain: str | Callable[[re.Match[str]], str]) -> Rewriting:
    """Return words, a pattern in which ``@`` is one of them, and its replacement.

    Only a text that contains one of the words can match, and the search for them takes a fraction of the time.
    """
    either = words.split("|")
    pattern = pattern.replace("@", f"(?:{'|'.join(map(re.escape, either))})")
    return tuple(either), re.compile(pattern, re.IGNORECASE | re.MULTILINE | re.DOTALL), plain


def _before_value(words: str) -> str:
    """Return a pattern of words, in a group, perhaps as text in LaTeX, before a number or formula."""
    return rf"(?<![0-9)}}] )(?<![^\W_])(?:\\text\s*\{{\s*)?(?P<words>{words})\s*\}}?\s*{VALUE}"


def _answer_of_json(value: re.Match[str]) -> str:
    answer = value["other"] if value["text"] is None else re.sub(r"\\([\"\\])", r"\1", value["text"])
    return f"\nAnswer: {answer.strip('[]')}\n"


def _equations(lines: re.Match[str]) -> str:
    """Return equations as a list in one line, and those that begin with the sign as the same equation."""
    body = re.sub(r"\\\\\s*(?==|$)", " ", lines["body"].replace("&", "").rstrip()).replace(r"\\", ",")
    return rf"\[{body}\]" if lines["display"] else body


def _relation(bound: re.Match[str]) -> str:
    """Return the sign of "at least", "no more than", "or less" etc."""
    words = bound["words"].casefold()
    negated = re.search(r"\bnot?\b", words) is not None
    below = (re.search(r"most|up to|max|under|below|less|fewer|smaller|lower", words) is not None) != negated
    strict = re.search(r"than|over|above|under|below", words) and not negated and "equal" not in words
    return ("<" if below else ">") if strict else (r"\le " if below else r"\ge ")


def _fraction(number: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction."""
    whole, digits, several, one = number.groups()
    period = several or one
    tail = Fraction(int(period), 10 ** len(period) - 1) / 10 ** len(digits)
    value = Fraction(f"{whole or 0}.{digits or 0}") + tail
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


REWRITINGS = (
    _rewriting(r"\\[", r"(?<=\\\\)\[[0-9.]+[a-z]+\]", ""),  # the height of a row
    _rewriting(
        "answer",
        r'"(?:final[ _]?)?@"\s*:\s*(?:"(?P<text>(?:[^"\\]|\\.)*)"|(?P<other>\[[^][{}]*\]|[^\s"{},\[\]]+))',
        _answer_of_json,
    ),
    _rewriting(
        r"\begin{",
        r"@(?P<name>(?P<display>align|equation|gather)\*?|aligned|gathered|split|cases)\}"
        r"(?P<body>(?:(?!\\begin|\\end).)*)\\end\{(?P=name)\}",
        _equations,
    ),
    _rewriting(
        r"$$|\[|\(",
        r"(?=@)(?:\$\$[^$]*\$\$|\\\[(?:(?!\\\[|\\\]).)*\\\]|\\\((?:(?!\\\(|\\\)).)*\\\))",
        lambda display: display[0].replace("\n", " "),
    ),
    _rewriting(r"\boldsymbol|\bm|\underline", r"@\s*\{([^{}]*)\}", r"\1"),
    _rewriting(r"\textcolor", r"@\s*\{[^{}]*\}\s*\{([^{}]*)\}", r"\1"),
    _rewriting(r"\big", r"@g?[lrm]?(?![a-z])", ""),  # of a bracket
    _rewriting("<answer>", "@", "\nAnswer: \n"),
    _rewriting("</answer>", "@", "\n\n"),
    _rewriting("\n>", "@ ?", "\n"),  # a quotation
    _rewriting("`", r"^[ \t]*@{3}[a-z]*[ \t]*$|@+", ""),
    _rewriting("<", r"@(?:/?(?:b|br|div|em|end|eos|i|p|s|span|strong)|\|\w+\|)>", " "),
    _rewriting("<=", "@", r"\\le "),
    _rewriting(">=", r"@(?!>)", r"\\ge "),
    _rewriting("equal to", r"(?<!or )\b@\b", "="),
    _rewriting("answer", r"^[#*_ \t]*(?:(?:final|correct) )?@[*_ \t]*\n+(?=[^\n]+\s*\Z)", "Answer: "),
    _rewriting(r"$|\[|\(|\boxed", r"^([^\n0-9\\]+)\n\s*(?=@)", r"\1 "),
    _rewriting("minus|negative", _before_value("@"), "-"),
    _rewriting("\u2013|\u2014", rf"(?<![\w)}}\]$%.])(?<![0-9)}}\]$%.] )@{VALUE}", "-"),
    _rewriting("maybe|perhaps|possibly|probably", _before_value("@"), ""),
    _rewriting("- ", rf"@(?:{'|'.join(rf'(?<={opening}- )' for opening in OPENINGS)}) *{VALUE}", "-"),
    _rewriting(r"\approx|\simeq", r"(?<![\w\\)}\]])([a-z])\s*@\b", r"\1 ="),
    _rewriting("^|**", r"(?<=[0-9])\s*(?:x|\*|\\times|\\cdot)\s*10\s*@", r" \\times 10^"),
    _rewriting("**", r"(?<![\w)*])@(?=\S)([^*\n]+)(?<=\S)@(?!\*)", r"\1"),  # bold
    _rewriting("**", r"(?<=[\w)])@(?=[-(]?[0-9])|(?<=[0-9)]) @ (?=[-(]?[0-9])", "^"),
    _rewriting("^", r"@(?:\(([-+]?[0-9]+)\)|([-+][0-9]+))", r"^{\1\2}"),
    _rewriting("over|above|under|below", _before_value(rf"{OPENING}@"), _relation),
    _rewriting("at least|at most|up to|maximum of|minimum of", _before_value("@"), _relation),
    _rewriting(" than", _before_value(rf"(?:not? )?(?:{SCALE_WORDS})@(?: or equal to)?"), _relation),
    _rewriting(
        SCALE_WORDS,
        r"(?P<value>(?<![0-9.,])-?[0-9][0-9.,]*(?:\s+(?!or\b)[a-z]+)?)\s+or\s+(?P<words>@)\b(?! than)",
        lambda bound: f"{_relation(bound)} {bound['value']}",
    ),
    _rewriting(
        r"\overline|\bar|\dot",
        r"(?<![0-9])([0-9]{0,50}+)\.([0-9]{0,50}+)@\s*(?:\{([0-9]{1,50})\}|([0-9]))",
        _fraction,
    ),
)


def plain_text(text: str) -> str:
    r"""Return the text with its values in one notation, and each display and each marked answer in one line.

    Digits of other scripts, fraction characters and signs are ASCII, ``x 10**3`` is ``\times 10^3``, ``minus 5`` is -5,
    "at least 5" is ``\ge 5``; the answers of JSON and of ``<answer>`` stand after ``Answer:``.
    """
    if not text.isascii():
        text = SUPERSCRIPTS.sub(lambda run: f"^{{{unicodedata.normalize('NFKC', run.group())}}}", text)
        text = text.translate({ord(letter): plain for letter in set(text) if (plain := _letter(letter)) is not None})
        text = BETWEEN_SCRIPTS.sub(" ", text)
    lower = text.casefold()
    for words, pattern, plain in REWRITINGS:
        for word in words:
            if word in lower:
                text = pattern.sub(plain, text)
                lower = text.casefold()
                break
    return CONTINENTAL.sub(lambda number: number[1].replace(".", "") + (number[3] or "").replace(",", "."), text)


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


def with_decimal_points(text: str) -> str:
    """Return the text with decimal points for decimal commas, outside of brackets and lists.

    Example:
        >>> with_decimal_points("3,14 is no pair (3,14), and 3,142 has thousands")
        '3.14 is no pair (3,14), and 3,142 has thousands'
    """
    return DECIMAL_COMMA.sub(r"\1.", text)


def without_spaces(text: str) -> str:
    """Return the text without spaces between the thousands of a number.

    Example:
        >>> without_spaces("1 234 567 apples")
        '1234567 apples'
    """
    return GROUPS.sub(lambda number: re.sub(r"[ ~\\]", "", number.group()), text)


def first_line(answer: str) -> str:
    """Return the first line of an answer, up to 200 characters."""
    return answer[:SPAN].partition("\n")[0].strip()


def _brace_content(text: str) -> str:
    """Return the text up to the brace that closes the one before the text; empty if it is not closed."""
    depth = 1
    for brace in BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if not depth:
            return text[: brace.start()]
    return ""


@lru_cache(maxsize=64)
def _plain_markers(markers: tuple[str, ...]) -> tuple[str, ...]:
    """Return the markers, and the one that :func:`plain_text` writes in place of a tag, key or heading."""
    return (*markers, "answer:") if any(map(REWRITTEN.fullmatch, markers)) else markers


@lru_cache(maxsize=64)
def _first_words(markers: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return each marker after its first word in lower case."""
    return [(marker.removesuffix(":").split(" ")[0].casefold(), marker) for marker in markers]


@lru_cache(maxsize=1024)
def markers_pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for a marker that is no part of a longer word, as in ``answer isn't``."""
    longest_first = "|".join(map(_loose, sorted(markers, key=len, reverse=True)))
    return re.compile(rf"(?:{longest_first})(?<![a-z](?=['\u2019]?[a-z]))", re.IGNORECASE)


def _loose(marker: str) -> str:
    body = marker.removesuffix(":")
    words = (r"(?:[ \t,()*_]+[^\W\d_]+){0,3}?[ \t,()*_]+").join(map(re.escape, body.split(" ")))
    return (
        words if body == marker else rf"{words}(?:\s*[(\[][^()\[\]\n]{{1,40}}[)\]]|\ in\ [^\W\d_]+)?[ \t*_]*[:\uff1a]"
    )
