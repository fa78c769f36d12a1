"""Values: what a reward function returned as one number or None for each row, or the reason why it is none."""

import math
from collections.abc import Iterable, Mapping, Set
from itertools import islice
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

PLAIN = frozenset({float, bool, type(None)})


class RubbishError(ValueError):
    """A reward function returned something else than one number or None for each completion."""


def values_of(returned: Any, number: int) -> list[float | None]:
    """One value for each of ``number`` rows; not finite where the function said so.

    Args:
        returned: a list, tuple, tensor, array or other iterable with a number or None for each row.
        number: of rows.

    Raises:
        RubbishError: if it is anything else; the message says what was returned and what is expected.

    Example:
        >>> values_of((True, None, 0.5), 3)
        [1.0, None, 0.5]
    """
    expected = f"expected {number} numbers or None, one for each completion"
    if isinstance(returned, str | bytes | Mapping | Set) or not isinstance(returned, Iterable):
        raise RubbishError(f"{expected}, got {_describe(returned)}")
    if getattr(returned, "ndim", 1) != 1:
        raise RubbishError(f"{expected}, got {type(returned).__name__} of shape {list(returned.shape)}")  # pyright: ignore[reportAttributeAccessIssue]
    items = list(islice(returned.tolist() if isinstance(returned, Tensor) else returned, number + 1))
    if len(items) != number:
        many = f"more than {number}" if len(items) > number and not hasattr(returned, "__len__") else None
        length = many or (len(returned) if hasattr(returned, "__len__") else len(items))  # pyright: ignore[reportArgumentType]
        raise RubbishError(f"{expected}, got {length} in {type(returned).__name__}")
    if set(map(type, items)) <= PLAIN:
        return [None if item is None else float(item) for item in items]
    values: list[float | None] = []
    for row, item in enumerate(items):
        if not _is_number(item):
            raise RubbishError(f"{expected}, got {_describe(item)} for row {row}")
        values.append(None if item is None else _float(item))
    return values


def _is_number(item: Any) -> bool:
    if isinstance(item, Tensor | np.ndarray):
        return item.ndim == 0 and not isinstance(item.item(), complex)
    return item is None or isinstance(item, Real | np.bool_)


def _float(item: Any) -> float:
    try:
        return float(item)
    except OverflowError:  # a whole number beyond every float
        return math.inf


def _describe(thing: Any) -> str:
    return "None" if thing is None else f"{type(thing).__name__} {thing!r:.200}"
