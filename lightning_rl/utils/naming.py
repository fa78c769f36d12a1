"""Names of user objects, for messages and metrics."""

from collections.abc import Iterable
from typing import Any

REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments of rewards besides the columns of the data."""


def name_of(function: Any) -> str:
    """Return the name of a function, or of the class of any other object.

    Example:
        >>> name_of(len), name_of(3)
        ('len', 'int')
    """
    return getattr(function, "__name__", type(function).__name__)


def in_words(names: Iterable[Any]) -> str:
    """Return names in quotes, separated by commas.

    Example:
        >>> print(in_words(["question", "answer"]))
        "question", "answer"
    """
    return ", ".join(f'"{name}"' for name in names) or "none"


def check_columns(columns: Iterable[Any], where: str) -> None:
    """Raise an error for data columns that cannot be passed to rewards or shadow their arguments.

    Args:
        columns: Names of the columns.
        where: Location of the columns, for the message.

    Raises:
        ValueError: If a name is not a string or is an argument of rewards.
    """
    columns = list(columns)
    if odd := [name for name in columns if not isinstance(name, str)]:
        raise ValueError(
            f"expected column names to be strings, since rewards get columns as keyword arguments, got {odd} in "
            f"{where}: rename them in the data"
        )
    if taken := [name for name in columns if name in REWARD_ARGUMENTS]:
        raise ValueError(
            f"expected column names other than {in_words(REWARD_ARGUMENTS)}, which are arguments of rewards, got "
            f'{in_words(taken)} in {where}: rename, as in columns={{"my_{taken[0]}": "{taken[0]}"}}'
        )
