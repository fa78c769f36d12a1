"""Detection of in-place edits by version counter and identity, and copies of plain values."""

from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
from torch import Tensor

Fields = Sequence[tuple[str, Tensor]]
ATOMS = frozenset({str, int, float, bool, type(None), bytes, complex})
COMPARED = ATOMS | {set}


class EditError(RuntimeError):
    """User code modified a read-only tensor in place."""


class Versions:
    """Identity and version counter of tensors, to detect that one was written to or replaced.

    Edits through ``.data``, ``.numpy()`` and pointers do not count.

    Args:
        fields: Names and tensors.

    Example:
        >>> rewards = Tensor([1.0, 0.0])
        >>> versions = Versions([("rewards", rewards)])
        >>> rewards *= 2
        >>> versions.changes([("rewards", rewards)])
        ['rewards']
    """

    __slots__ = ("_fields", "_versions")

    def __init__(self, fields: Fields) -> None:
        self._fields, self._versions = fields, _versions(fields)  # held, because an id is reused after its object

    def changes(self, fields: Fields) -> list[str]:
        """Return the names of fields that were written, replaced, added or removed since."""
        now = _versions(fields)
        if now == self._versions:
            return []
        before, after = (
            {name: version for (name, _), version in zip(pairs, versions, strict=True)}
            for pairs, versions in ((self._fields, self._versions), (fields, now))
        )
        return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def _versions(fields: Fields) -> list[tuple[int, int]]:
    return [(id(tensor), tensor._version) for _, tensor in fields]  # noqa: SLF001


def refuse_edits(who: str, fields: Iterable[str], cure: str) -> None:
    """Raise EditError if there are edited fields."""
    if names := ", ".join(fields):
        raise EditError(f"{who} wrote in place to {names}: {cure}")


def copy_plain(value: Any) -> Any:
    """Return a deep copy of lists, dicts, tuples, sets, arrays and tensors; other objects are shared.

    Example:
        >>> rows = [{"role": "user", "content": "2 + 2?"}]
        >>> copy_plain(rows)[0].clear()
        >>> rows
        [{'role': 'user', 'content': '2 + 2?'}]
    """
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind in (list, tuple):
        return kind(value if ATOMS.issuperset(map(type, value)) else map(copy_plain, value))
    if kind is dict:
        return {key: copy_plain(entry) for key, entry in value.items()}
    if kind is set or kind is np.ndarray:
        return value.copy()
    return value.clone() if kind is Tensor else value


def same_plain(first: Any, second: Any) -> bool:
    """Return True if a value equals its copy by :func:`copy_plain`; shared objects are compared by identity."""
    if first is second:
        return True
    kind = type(first)
    if kind is not type(second):
        return False
    if kind in (list, tuple):
        alike = len(first) == len(second)
        return alike and (all(map(is_, first, second)) or all(map(same_plain, first, second)))
    if kind is dict:
        return list(first) == list(second) and all(same_plain(first[key], second[key]) for key in first)
    if kind is np.ndarray or kind is Tensor:
        return first.shape == second.shape and bool(((first == second) | (first != first)).all())
    return kind in COMPARED and bool(first == second)


def changed_entries(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the keys of a dict whose values have changed."""
    return [key for key in {**before, **after} if not same_plain(before.get(key), after.get(key))]
