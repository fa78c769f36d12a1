"""Terminal: text of models and files for a person, its control characters shown and never acted on."""

import json
import re
import unicodedata
from typing import Any

BEYOND_ASCII = re.compile(r"[^\x20-\x7e\n]+")
LINE_ENDS = ("Zl", "Zp")  # U+2028 and U+2029, at which readers of lines of JSON part them


def visible(text: str) -> str:
    r"""A text whose control characters, but line ends, are written out as Python writes them.

    A model can write whatever it likes, and so can a file from elsewhere: sequences that move the cursor, rename the
    window, reverse the direction of reading or hide what follows. Unicode's category C holds all of these.

    Example:
        >>> visible("done\x1b[2K\nnext")
        'done\\x1b[2K\nnext'
    """
    return "".join(map(_visible, text))


def _visible(mark: str) -> str:
    return repr(mark)[1:-1] if mark != "\n" and unicodedata.category(mark).startswith("C") else mark


def dump_visible(value: Any, **options: Any) -> str:
    r"""JSON that any reader takes for the same values, and that does nothing where it is printed.

    Letters stay as they are; whatever :func:`visible` writes out, and what else ends a line, is an escape of JSON.

    Args:
        value: what is written.
        options: of :func:`json.dumps`.

    Example:
        >>> dump_visible({"text": "漢字\u202e\x9b"})
        '{"text": "漢字\\u202e\\u009b"}'
    """
    return BEYOND_ASCII.sub(_escape_part, json.dumps(value, ensure_ascii=False, **options))


def _escape_part(part: re.Match[str]) -> str:
    text = part.group()
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(mark: str) -> str:
    category = unicodedata.category(mark)
    return json.dumps(mark)[1:-1] if category.startswith("C") or category in LINE_ENDS else mark
