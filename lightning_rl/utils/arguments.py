"""Argument checks for constructors; errors name the argument, the expected value and the actual one."""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Set
from difflib import get_close_matches
from functools import partial, wraps
from numbers import Real
from typing import Any, TypeVar, cast

from lightning_rl.utils.naming import name_of
from lightning_rl.utils.renamed import ELSEWHERE

F = TypeVar("F", bound=Callable[..., Any])


def refuse_other_names(owner: str, **renamed: str) -> Callable[[F], F]:
    """Return a decorator that raises TypeError for unknown names of options, with the name to use instead.

    Args:
        owner: Name of the class, whose constructor is decorated.
        renamed: New names by old names, such as ``"group_size="`` or ``"rewards=Rewards(timeout=)"``.

    Example:
        >>> refuse_other_names("Module", n="group_size=")(lambda *, group_size=8: group_size)(n=4)
        Traceback (most recent call last):
        TypeError: expected group_size=, got n=, its old name: rename it
    """

    def decorate(function: F) -> F:
        known = list(inspect.signature(function).parameters)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name in known:
                    continue
                if name in renamed:
                    raise TypeError(f"expected {renamed[name]}, got {name}=, its old name: rename it")
                near = get_close_matches(name, known, 1, cutoff=0.75)
                if name in ELSEWHERE or near:
                    place = ELSEWHERE.get(name) or f"{near[0]}= of {owner}"
                    raise TypeError(f"expected {place}, got {name}= of {owner}: pass it there")
            return function(*args, **kwargs)

        return cast(F, call)

    return decorate


def check_numbers(
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    finite: bool = False,
    optional: bool = False,
    **numbers: Any,
) -> None:
    """Raise ValueError unless all arguments are real numbers within bounds; NaN, True and False are not.

    Args:
        above: Exclusive lower bound.
        at_least: Inclusive lower bound.
        at_most: Inclusive upper bound.
        finite: If True, infinity is an error.
        optional: If True, None is allowed.
        numbers: Arguments by name.

    Example:
        >>> check_numbers(at_least=0, finite=True, coef="0.1")
        Traceback (most recent call last):
        ...
        ValueError: expected coef to be a number >= 0, got str '0.1': remove the quotes
    """
    bounds, none = _bounds(above, at_least, at_most), " or None" if optional else ""
    for name, number in numbers.items():
        if optional and number is None:
            continue
        if not isinstance(number, Real) or isinstance(number, bool):
            raise ValueError(f"expected {name} to be a number{bounds}{none}, got {_with_type(number)}")
        infinite = finite and math.isinf(number)
        if infinite or not _within(float(number), above, at_least, at_most):
            bound = bounds.removeprefix(" ") or "to be a number"
            raise ValueError(f"expected {name} {bound}{none}{' and finite' if infinite else ''}, got {number!r}")


def check_counts(minimum: int, *, optional: bool = False, **numbers: Any) -> None:
    """Raise ValueError unless all arguments are integers of at least ``minimum``."""
    at_least = "above 0" if minimum == 1 else f"of at least {minimum}"
    for name, number in numbers.items():
        if optional and number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int) or number < minimum:
            none = " or None" if optional else ""
            raise ValueError(f"expected {name} to be a whole number {at_least}{none}, got {_with_type(number)}")


def check_unicode(text: str, name: str = "a message", cure: str = "leave it out") -> None:
    """Raise ValueError for half of a surrogate pair in a text, which no tokenizer encodes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"{text[error.start]!a} at character {error.start}, half of a surrogate pair"
        raise ValueError(f"expected a text that UTF-8 can write in {name}, got {got}: {cure}") from error


def check_bools(**flags: Any) -> None:
    """Raise ValueError unless all arguments are True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"expected {name} to be True or False, got {flag!r}")


def check_choices(choices: Iterable[str], **given: Any) -> None:
    """Raise ValueError unless all arguments are among the choices."""
    known = list(choices)
    for name, choice in given.items():
        if not isinstance(choice, str) or choice not in known:
            raise ValueError(f"expected {name} {' or '.join(known)}, got {choice!r}")


def check_signature(option: str, function: Any, *arguments: str) -> None:
    """Raise ValueError for a function, a partial or a class that cannot be called with the arguments by position."""
    if not (isinstance(function, partial | type) or inspect.isroutine(function)):
        return
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        name, missing = name_of(function), re.findall("required argument: '(.*)'", str(error))
        cure = f"; bind it, as in functools.partial({name}, {missing[0]}=...)" if missing else ""
        raise ValueError(
            f"expected {option} to be a function of ({', '.join(arguments)}), got {name}{signature}: {error}{cure}"
        ) from error


def check_text(*, optional: bool = False, **given: Any) -> None:
    """Raise ValueError unless all arguments are non-empty strings."""
    for name, text in given.items():
        if not (isinstance(text, str) and text) and not (optional and text is None):
            none = " or None" if optional else ""
            raise ValueError(f"expected {name} to be a string of at least one letter{none}, got {text!r:.200}")


def check_texts(**given: Any) -> None:
    """Raise ValueError unless all arguments are lists or tuples of non-empty strings."""
    for name, texts in given.items():
        cure = f": write [{texts!r}]" if isinstance(texts, str) else ""
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(
                f"expected {name} to be a list of strings of at least one letter, got {texts!r:.200}{cure}"
            )


def check_rows(number: int, /, **given: Any) -> None:
    """Raise ValueError unless all arguments are sequences of ``number`` values, one per row."""
    for name, values in given.items():
        if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__len__"):
            raise ValueError(f"expected {name} to be a list of {number} values, one for each row, got {values!r:.200}")
        if len(values) != number:
            raise ValueError(f"expected {name} to hold {number} values, one for each row, got {len(values)}")


def _with_type(value: object) -> str:
    """Return a value with its type unless it is a number or None, and how to write a number that is a string."""
    if value is None or isinstance(value, Real):
        return repr(value)
    quoted = isinstance(value, str) and value.strip().lstrip("+-")[:1].isdigit()
    return f"{type(value).__name__} {value!r}{': remove the quotes' if quoted else ''}"


def _bounds(above: float | None, at_least: float | None, at_most: float | None) -> str:
    if above is None and at_least is None:
        return "" if at_most is None else f" <= {at_most:g}"
    if at_most is None:
        return f" > {above:g}" if above is not None else f" >= {at_least:g}"
    opening = f"({above:g}" if above is not None else f"[{at_least:g}"
    return f" in {opening}, {at_most:g}]"


def _within(number: float, above: float | None, at_least: float | None, at_most: float | None) -> bool:
    return not (
        math.isnan(number)
        or (above is not None and number <= above)
        or (at_least is not None and number < at_least)
        or (at_most is not None and number > at_most)
    )
