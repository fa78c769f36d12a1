"""Names of what a user passes, for messages and metrics."""

from typing import Any


def name_of(function: Any) -> str:
    """The name of a function, or of the class of any other object.

    Example:
        >>> name_of(len), name_of(3)
        ('len', 'int')
    """
    return getattr(function, "__name__", type(function).__name__)
