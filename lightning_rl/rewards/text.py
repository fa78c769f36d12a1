"""Inputs of rewards: the text of a completion, a column of the data, and the answer in a text."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from lightning_rl.utils.arguments import check_rows
from lightning_rl.utils.naming import REWARD_ARGUMENTS

SENTENCES = (
    *("answer is", "answers are", "antwort ist", "antwort lautet", "antworten sind"),  # codespell:ignore ist
    *("respuesta es", "respuestas son", "r\u00e9ponse est", "r\u00e9ponses sont", "risposta \u00e8", "risposte sono"),
    *("resposta \u00e9", "respostas s\u00e3o", "\u043e\u0442\u0432\u0435\u0442 \u0440\u0430\u0432\u0435\u043d"),
)
EAST_ASIAN = ("\u7b54\u6848", "\u7b54\u3048", "\ub2f5")  # answer in Chinese, Japanese and Korean
MARKERS = (
    *("####", r"\boxed{", r"\fbox{", *SENTENCES),
    *dict.fromkeys(sentence.split()[0] + ":" for sentence in SENTENCES),
    *(noun + ":" for noun in EAST_ASIAN),
    *("\u7b54\u6848\u662f", "\u7b54\u6848\u4e3a", "\u7b54\u6848\u5e94\u4e3a", "\u6545\u9009", "\u7b54\u3048\u306f"),
    "\ub2f5\uc740",
)
SPAN = 200  # maximum length of the line with an answer
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
            f"add it to the data, or name another column with {option}="
        )
    check_rows(rows, **{name: columns[name]})
    return columns[name]


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

    After a marker that opens a brace, the text in braces, which is empty if the brace is not closed.

    Args:
        text: Text of a completion.
        markers: Strings that precede an answer, case-insensitive. Up to three words may stand in place of a space, as
            in ``answer to this is``, and a unit before a final colon, as in ``Answer (in cm):``.

    Example:
        >>> stated_answer("The answer is 4. #### 5"), stated_answer(r"It is \boxed{5} now"), stated_answer(r"\boxed{5")
        ('5', '5', '')
    """
    last = None
    for last in _marker_pattern(tuple(markers)).finditer(text) if markers else ():  # noqa: B007  the last one decides
        pass
    if last is None:
        return None
    after = text[last.end() :]
    return (_brace_content(after) if last.group().endswith("{") else after).strip()


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
def _marker_pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for a marker that is no part of a longer word, as in ``answer isn't``."""
    longest_first = "|".join(map(_loose, sorted(markers, key=len, reverse=True)))
    return re.compile(rf"(?:{longest_first})(?<![a-z](?=['\u2019]?[a-z]))", re.IGNORECASE)


def _loose(marker: str) -> str:
    body = marker.removesuffix(":")
    words = (r"(?:[ \t,()*_]+[^\W\d_]+){0,3}?[ \t,()*_]+").join(map(re.escape, body.split(" ")))
    return (
        words if body == marker else rf"{words}(?:\s*[(\[][^()\[\]\n]{{1,40}}[)\]]|\ in\ [^\W\d_]+)?[ \t*_]*[:\uff1a]"
    )
