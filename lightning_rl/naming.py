"""Names of what a user passes, for messages and metrics."""

from collections.abc import Iterable
from typing import Any

REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What rewards are given beside the columns of the data."""


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


def check_columns(columns: Iterable[Any], where: str) -> None:
    """Refuses columns of the data that rewards cannot be given, or that would take the place of what they are given.

    Args:
        columns: their names.
        where: they are, for the message.

    Raises:
        ValueError: naming them, and how to rename one.
    """
    columns = list(columns)
    if odd := [name for name in columns if not isinstance(name, str)]:
        raise ValueError(
            f"expected names of columns to be strings, since rewards are given columns by their names, got {odd} in "
            f"{where}: rename it in the data"
        )
    if taken := [name for name in columns if name in REWARD_ARGUMENTS]:
        raise ValueError(
            f"expected columns with other names than {in_words(REWARD_ARGUMENTS)}, which rewards are given beside "
            f'them, got {in_words(taken)} in {where}: rename, as in columns={{"my_{taken[0]}": "{taken[0]}"}}'
        )
