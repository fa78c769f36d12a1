"""Names of what a user passes, for messages and metrics."""

from collections.abc import Iterable
from typing import Any


def name_of(function: Any) -> str:
    """The name of a function, or of the class of any other object.

    Example:
        >>> name_of(len), name_of(3)
        ('len', 'int')
    """
    return getattr(function, "__name__", type(function).__name__)


def in_words(names: Iterable[Any]) -> str:
    """Names in quotes, with commas between them.

    Example:
        >>> print(in_words(["question", "answer"]))
        "question", "answer"
    """
    return ", ".join(f'"{name}"' for name in names) or "none"
