"""Conversion of the result of a reward function to one number or None per row."""

import math
from collections.abc import Iterable, Mapping, Set, Sized
from itertools import islice
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor


class InvalidRewardError(ValueError):
    """Result of a reward function that is not one number or None per completion."""


def values_of(returned: Any, number: int) -> list[float | None]:
    """Return one value for each of ``number`` rows; values that are not finite are kept.

    Args:
        returned: List, tuple, tensor, array or other iterable with a number or None per row.
        number: Number of rows.

    Raises:
        InvalidRewardError: If it is anything else.

    Example:
        >>> values_of((True, None, 0.5), 3)
        [1.0, None, 0.5]
    """
    expected = f"expected {number} numbers or None, one for each completion"
    if isinstance(returned, str | bytes | Mapping | Set) or not isinstance(returned, Iterable):
        raise InvalidRewardError(f"{expected}, got {_describe(returned)}")
    if getattr(returned, "ndim", 1) != 1:
        raise InvalidRewardError(f"{expected}, got {type(returned).__name__} of shape {list(returned.shape)}")  # pyrefly: ignore[missing-attribute]
    items = list(islice(returned.tolist() if isinstance(returned, Tensor) else returned, number + 1))
    if len(items) != number:
        length = len(returned) if isinstance(returned, Sized) else min(len(items), number)
        more = "" if isinstance(returned, Sized) or len(items) < number else "more than "
        raise InvalidRewardError(f"{expected}, got {more}{length} in {type(returned).__name__}")
    for row, item in enumerate(items):
        if not _is_number(item):
            raise InvalidRewardError(f"{expected}, got {_describe(item)} for row {row}")
    return [None if item is None else _float(item) for item in items]


def _is_number(item: Any) -> bool:
    if item is None or isinstance(item, float | Real | np.bool_):  # float first: Real is abstract, and slow to ask
        return True
    return isinstance(item, Tensor | np.ndarray) and item.ndim == 0 and not isinstance(item.item(), complex)


def _float(item: Any) -> float:
    try:
        return float(item)
    except OverflowError:  # an integer too large for a float
        return math.inf


def _describe(thing: Any) -> str:
    return "None" if thing is None else f"{type(thing).__name__} {thing!r:.200}"
