"""Names of user objects, for messages and metrics."""

from collections.abc import Iterable
from difflib import get_close_matches
from types import FunctionType
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


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the name that is nearest to another one, in quotes; empty if none is near.

    Example:
        >>> print(nearest("solution", ["question", "solutions"]))
        "solutions"
    """
    return "".join(f'"{near}"' for near in get_close_matches(name, [*names], 1))


class CheckedNames:
    """Base of classes that users derive from: a subclass with a misspelled method, which nothing would call, raises.

    Raises:
        ValueError: If the name of a public method is new and near the name of a method of a base class.
    """

    def __init_subclass__(cls) -> None:
        """Check the names of the methods of a new subclass."""
        super().__init_subclass__()
        known = {name for base in cls.__mro__[1:] for name in vars(base) if not name.startswith("_")}
        called = [name for name in known if isinstance(getattr(cls, name), FunctionType)]
        for name, value in vars(cls).items():
            if isinstance(value, FunctionType) and not name.startswith("_") and name not in known:
                _refuse_near_name(cls, name, called)


def check_hooks(cls: type, base: type, further: Iterable[str] = ()) -> None:
    """Raise an error for a class with a misspelled hook, which nothing would call.

    Args:
        cls: Class to check.
        base: Base class, whose methods that begin with ``on_`` are hooks.
        further: Names of other hooks.

    Raises:
        ValueError: If the name of a method is new and near the name of a hook.
    """
    hooks = {*further, *(name for name in dir(base) if name.startswith("on_"))}
    public = (name for name in dir(cls) if not name.startswith("_") and not hasattr(base, name))
    for name in public:
        if isinstance(getattr(cls, name), FunctionType):
            _refuse_near_name(cls, name, [one for one in hooks if one.startswith("on_") is name.startswith("on_")])


def _refuse_near_name(cls: type, name: str, called: Iterable[str]) -> None:
    called, batch = [*called], name.replace("_step_", "_batch_")
    if near := [batch] if batch in called else get_close_matches(name, called, 1, cutoff=0.85):
        raise ValueError(
            f"expected {cls.__name__} to define {near[0]}, got {name}, which nothing calls: write {near[0]}, "
            "or give a method of your own a name that is less like it"
        )


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
