"""Serialize: objects as plain JSON values, by the place they are imported from and what they hold, and back again.

What no other process could import (a function of a script, a lambda, a model) is kept as text, for a person; it comes
back as an :class:`Opaque`, which says so as soon as it is used.
"""

import dataclasses
import importlib
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn

OBJECT, NAME, PARTIAL, TUPLE, NUMBER, OPAQUE = "$object", "$name", "$partial", "$tuple", "$number", "$opaque"
PLAIN = (type(None), bool, int, str)
LENT = ("log", "log_dict", "collectives")  # what Lightning and the core put on every callback


class Opaque:
    """In the place of something that a recording could not hold.

    Args:
        text: what it was.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raises a ValueError, because what was recorded is a text."""
        raise ValueError(
            f"expected something that can be imported, got {self.text}, which a recording keeps as a text: pass "
            "--recipe with the script that made the run, or move it into a module"
        )


def to_json(value: Any, around: tuple[int, ...] = ()) -> Any:
    """A value as plain JSON; ``around`` holds the identities of the objects that it lies in."""
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
    if (name := _import_path(value)) is not None:
        return {NAME: name}
    kind, state = _import_path(type(value)), _state(value)
    if kind is None or state is None or id(value) in around or isinstance(value, Tensor | nn.Module):
        qualname = getattr(value, "__qualname__", None)
        text = f"the {type(value).__name__} {qualname}" if isinstance(qualname, str) else f"a {type(value).__name__}"
        return {OPAQUE: text}
    return {OBJECT: kind, "state": {key: to_json(item, (*around, id(value))) for key, item in state.items()}}


def from_json(description: Any) -> Any:
    """The value that was described. Imports what the description names; nothing of it is called."""
    if isinstance(description, list):
        return [from_json(item) for item in description]
    if not isinstance(description, dict):
        return description
    if NUMBER in description:
        return float(description[NUMBER])
    if TUPLE in description:
        return tuple(from_json(item) for item in description[TUPLE])
    if NAME in description:
        return _import(description[NAME])
    if OPAQUE in description:
        return Opaque(description[OPAQUE])
    if PARTIAL in description:
        return partial(
            from_json(description[PARTIAL]), *from_json(description["args"]), **from_json(description["keywords"])
        )
    if OBJECT in description:
        kind = _import(description[OBJECT])
        instance = object.__new__(kind)
        for key, item in description["state"].items():
            object.__setattr__(instance, key, from_json(item))  # frozen dataclasses as well
        return instance
    return {key: from_json(item) for key, item in description.items()}


def opaque_places(description: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Where a description holds a text instead of a value, and the text."""
    if isinstance(description, list):
        for number, item in enumerate(description):
            yield from opaque_places(item, f"{place}[{number}]")
    elif isinstance(description, dict):
        if OPAQUE in description:
            yield place, description[OPAQUE]
            return
        for key, item in description.items():
            inner = place if key in (TUPLE, PARTIAL, "state") else f"{place}.{key}".removeprefix(".")
            yield from opaque_places(item, inner)


def _import_path(value: Any) -> str | None:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__" or "<" in name:
        return None
    path = f"{module}:{name}"
    try:
        return path if _import(path) is value else None
    except (ImportError, AttributeError):
        return None


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    return target


def _state(value: Any) -> dict[str, Any] | None:
    if dataclasses.is_dataclass(value):
        return {spec.name: getattr(value, spec.name) for spec in dataclasses.fields(value)}
    if not hasattr(value, "__dict__"):
        return None
    return {key: item for key, item in vars(value).items() if key not in LENT}
