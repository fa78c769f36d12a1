"""Conversion of objects to JSON values and back: import path and state of each object.

A description may come from an untrusted source. Its names are looked up in :mod:`lightning_rl.recording.known`, which
holds the library's own parts, and never imported; the constructors check every value. Any other name (a user function
or class, a lambda, a model) is kept as text and becomes an :class:`Opaque`, which raises when used.
"""

import dataclasses
import inspect
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn

from lightning_rl.corrections import RLCallback
from lightning_rl.recording.known import CLASSES, FUNCTIONS
from lightning_rl.utils.terminal import visible

OBJECT, NAME, PARTIAL, TUPLE, NUMBER, OPAQUE = "$object", "$name", "$partial", "$tuple", "$number", "$opaque"
PLAIN = (type(None), bool, int, str)
LENT = ("log", "log_dict", "collectives")  # attributes that Lightning and the core set on every callback


class Opaque:
    """Placeholder for an object that a recording cannot hold.

    Args:
        text: Description of the object.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise a ValueError, because the recording holds only a text."""
        raise ValueError(not_ours(self.text))


def not_ours(text: str, place: str = "") -> str:
    """Return the error message for a part that a recording names but does not hold.

    Args:
        text: Name in the recording.
        place: Place in the algorithm.
    """
    return (
        f"expected a part of lightning_rl, got {visible(text)}{place and f' as {visible(place)}'}, of which a "
        "recording holds only the name: pass --recipe with the script that made the run"
    )


def to_json(value: Any, around: tuple[int, ...] = ()) -> Any:
    """Return a value as JSON values; ``around`` holds the ids of the enclosing objects."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {NUMBER: repr(value)}
    if isinstance(value, list):
        return [to_json(item, around) for item in value]
    if isinstance(value, tuple):
        return {TUPLE: [to_json(item, around) for item in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: to_json(item, around) for key, item in value.items()}
    if isinstance(value, partial):
        bound = {"args": to_json(list(value.args), around), "keywords": to_json(value.keywords, around)}
        return {PARTIAL: to_json(value.func, around), **bound}
    if (name := _named_path(value)) is not None:
        return {NAME: name}
    kind, state = _named_path(type(value)), _state(value)
    if kind is None or state is None or id(value) in around or isinstance(value, Tensor | nn.Module):
        qualname = getattr(value, "__qualname__", None)
        text = f"the {type(value).__name__} {qualname}" if isinstance(qualname, str) else f"a {type(value).__name__}"
        return {OPAQUE: text}
    return {OBJECT: kind, "state": {key: to_json(item, (*around, id(value))) for key, item in state.items()}}


def from_json(description: Any) -> Any:
    """Return the described value; an :class:`Opaque` for anything but plain values and parts of the library.

    Raises:
        ValueError: If a constructor refuses the values of a part, or the form of the description is unknown.
    """
    if isinstance(description, list):
        return [from_json(item) for item in description]
    if not isinstance(description, dict):
        return description
    marks = [mark for mark in _FORMS if mark in description]
    if not marks:
        return {key: from_json(item) for key, item in description.items()}
    expected, make = _FORMS[marks[0]]
    if description.keys() != {marks[0], *expected}:
        raise ValueError(f"expected {marks[0]} {' '.join(expected)} in a recording, got {' '.join(description)[:80]!r}")
    return make(*(description[key] for key in (marks[0], *expected)))


def opaque_places(description: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield place and text of each opaque value in a description."""
    if isinstance(description, list):
        for number, item in enumerate(description):
            yield from opaque_places(item, f"{place}[{number}]")
    elif isinstance(description, dict):
        text = _foreign(description)
        if text is not None:
            yield place, text
            return
        for key, item in description.items():
            inner = place if key in (TUPLE, PARTIAL, "state") else f"{place}.{key}".removeprefix(".")
            yield from opaque_places(item, inner)


def _foreign(description: Mapping[str, Any]) -> str | None:
    """Return the text of a described value that is not the library's, else None."""
    for mark, table in ((OPAQUE, {}), (NAME, FUNCTIONS), (OBJECT, CLASSES)):
        if mark in description:
            text = description[mark]
            return None if isinstance(text, str) and text in table else str(text)
    return None


def _named_path(value: Any) -> str | None:
    """Return the import path of a class or function, or None if it cannot be imported by name."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__" or "<" in name:
        return None
    target: Any = sys.modules.get(module)
    for part in name.split("."):
        target = getattr(target, part, None)
    return f"{module}:{name}" if target is value else None


def _state(value: Any) -> dict[str, Any] | None:
    if dataclasses.is_dataclass(value):
        return {spec.name: getattr(value, spec.name) for spec in dataclasses.fields(value)}
    if not hasattr(value, "__dict__"):
        return None
    return {key: item for key, item in vars(value).items() if key not in LENT}


def _number(text: Any) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(f"expected {NUMBER} nan, inf or -inf, got {str(text)[:80]!r}")
    return float(text)


def _items(items: Any) -> tuple[Any, ...]:
    if not isinstance(items, list):
        raise ValueError(f"expected {TUPLE} with a list, got a {type(items).__name__}")
    return tuple(from_json(item) for item in items)


def _function(path: Any) -> Any:
    known = FUNCTIONS.get(path) if isinstance(path, str) else None
    return Opaque(str(path)) if known is None else known


def _bind(function: Any, args: Any, keywords: Any) -> Any:
    known = from_json(function)
    if not callable(known) or not isinstance(args, list) or not isinstance(keywords, dict):
        raise ValueError(f"expected {PARTIAL} of a function with args and keywords, got {str(function)[:80]!r}")
    return partial(known, *from_json(args), **from_json(keywords))


def _make(path: Any, state: Any) -> Any:
    """Return an object of the library built by its constructor, which checks the values."""
    kind = CLASSES.get(path) if isinstance(path, str) else None
    if kind is None:
        return Opaque(str(path))
    if not isinstance(state, dict):
        raise ValueError(f"expected a mapping of the fields of {path}, got a {type(state).__name__}")
    values = {key: from_json(item) for key, item in state.items()}
    taken = {key: value for key, value in values.items() if key in inspect.signature(kind).parameters}
    try:
        with warnings.catch_warnings():  # the run has shown these warnings
            warnings.simplefilter("ignore")
            made = kind(**taken)
    except (TypeError, ValueError, OverflowError, ArithmeticError) as refused:
        raise ValueError(f"expected valid fields of {path}, got others: {visible(str(refused))}") from refused
    foreign = sorted(values.keys() - taken.keys() - (_state(made) or {}).keys() - {"name"})
    if foreign:
        raise ValueError(f"expected only fields of {path}, got {foreign[0][:80]!r}")
    if isinstance(made, RLCallback) and isinstance(values.get("name"), str):
        made.name = values["name"]
    return made


_FORMS: dict[str, tuple[tuple[str, ...], Any]] = {
    NUMBER: ((), _number),
    TUPLE: ((), _items),
    NAME: ((), _function),
    OPAQUE: ((), lambda text: Opaque(str(text))),
    PARTIAL: (("args", "keywords"), _bind),
    OBJECT: (("state",), _make),
}
