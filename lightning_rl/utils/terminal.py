"""Text of models and files with visible control characters, safe to print."""

import json
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BEYOND_ASCII = re.compile(r"[^\x20-\x7e\n]+")
LINE_ENDS = ("Zl", "Zp")  # U+2028 and U+2029, line ends for some readers of JSON lines


def visible(text: str) -> str:
    r"""Return a text with control characters, except line ends, escaped as in Python.

    Unescaped, text of a model or a file can move the cursor, rename the window, reverse the reading direction or hide
    text. Unicode's category C contains all such characters.

    Example:
        >>> visible("done\x1b[2K\nnext")
        'done\\x1b[2K\nnext'
    """
    return "".join(map(_visible, text))


def _visible(char: str) -> str:
    return repr(char)[1:-1] if char != "\n" and unicodedata.category(char).startswith("C") else char


def dump_visible(value: Any, **options: Any) -> str:
    r"""Return equivalent JSON with the characters that :func:`visible` escapes, and line ends, as JSON escapes.

    Args:
        value: Value to serialize.
        options: Options of :func:`json.dumps`.

    Example:
        >>> dump_visible({"text": "漢字\u202e\x9b"})
        '{"text": "漢字\\u202e\\u009b"}'
    """
    return BEYOND_ASCII.sub(_escape_part, json.dumps(value, ensure_ascii=False, **options))


def write_visible(path: Path, records: Iterable[Any]) -> bool:
    """Write a JSON Lines file; return False if that fails, as a full disk should not end a run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.writelines(dump_visible(record, default=repr) + "\n" for record in records)
    except (OSError, ValueError, TypeError):
        return False
    return True


def _escape_part(part: re.Match[str]) -> str:
    text = part.group()
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(char: str) -> str:
    category = unicodedata.category(char)
    return json.dumps(char)[1:-1] if category.startswith("C") or category in LINE_ENDS else char
