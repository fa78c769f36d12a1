"""What an argument of a recipe can be, and how it is written in Python and in YAML."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

WIDTH = 120


@dataclass(frozen=True, slots=True)
class Named:
    """A function or class by its dotted name."""

    path: str


@dataclass(frozen=True, slots=True)
class Call:
    """An object: a class by its dotted name, with arguments.

    Attributes:
        path: dotted name.
        options: arguments by keyword.
        names: arguments by place, which stand first; those of YAML have to be options.
        bound: whether it is called later, by whoever has the rest of its arguments: a ``functools.partial``.
    """

    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[Any, ...] = ()
    bound: bool = False


@dataclass(frozen=True, slots=True)
class Code:
    """An expression of Python, as somebody wrote it.

    Attributes:
        text: the expression.
        imports: dotted names that it needs.
    """

    text: str
    imports: tuple[str, ...] = ()


class NoYAMLError(Exception):
    """A value has no form in YAML."""


def imports_of(value: Any) -> Iterator[str]:
    """The dotted names that a value needs in Python."""
    if isinstance(value, Named):
        yield value.path
    elif isinstance(value, Code):
        yield from value.imports
    elif isinstance(value, Call):
        yield from ("functools.partial", value.path) if value.bound else (value.path,)
        for part in (*value.names, *value.options.values()):
            yield from imports_of(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from imports_of(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from imports_of(part)


def local_name(path: str) -> str:
    """What a dotted name is called where it is used: classes behind classes keep the dot, ``Model.from_pretrained``."""
    parts = path.split(".")
    first = next((place for place, part in enumerate(parts) if part[:1].isupper()), len(parts) - 1)
    return ".".join(parts[first:])


def import_of(path: str) -> tuple[str, str]:
    """Module and name of the import statement that a dotted name needs."""
    name = local_name(path)
    return path.removesuffix(f".{name}"), name.partition(".")[0]


def python(value: Any, indent: int = 0, beside: int = 0) -> str:
    """A value as Python, on one line if it fits, else with one part on each line.

    Args:
        value: made of plain values and those of this module.
        indent: columns before its first line.
        beside: columns that stand beside it on its first line.
    """
    flat = _flat(value)
    if indent + beside + len(flat) <= WIDTH and "\n" not in flat:
        return flat
    inner = indent + 4
    if isinstance(value, Call):
        head, tail = f"{'partial' if value.bound else local_name(value.path)}(", ")"
        parts = [f"{local_name(value.path)}"] if value.bound else []
        parts += [python(part, inner, 1) for part in value.names]
        parts += [f"{name}={python(part, inner, len(name) + 2)}" for name, part in value.options.items()]
    elif isinstance(value, Mapping):
        head, tail = "{", "}"
        parts = [f"{key!r}: {python(part, inner, len(repr(key)) + 3)}" for key, part in value.items()]
    elif isinstance(value, list):
        head, tail = "[", "]"
        parts = [python(part, inner, 1) for part in value]
    else:
        return flat
    return "\n".join([head, *(f"{' ' * inner}{part}," for part in parts), f"{' ' * indent}{tail}"])


def _flat(value: Any) -> str:
    if isinstance(value, Named):
        return local_name(value.path)
    if isinstance(value, Code):
        return value.text
    if isinstance(value, Call):
        arguments = [*map(_flat, value.names), *(f"{name}={_flat(part)}" for name, part in value.options.items())]
        if value.bound:
            return f"partial({', '.join([local_name(value.path), *arguments])})"
        return f"{local_name(value.path)}({', '.join(arguments)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_flat(key)}: {_flat(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_flat, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flat, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, str) and repr(value) == f"'{value}'" and '"' not in value:
        return f'"{value}"'
    return repr(value)


def plain(value: Any) -> Any:
    """A value as a YAML file of LightningCLI has it.

    Raises:
        NoYAMLError: if it is code, or an argument by place.
    """
    if isinstance(value, Code):
        raise NoYAMLError(value.text)
    if isinstance(value, Named):
        return value.path
    if isinstance(value, Call):
        if value.names:
            raise NoYAMLError(_flat(value))
        return {"class_path": value.path, "init_args": plain(dict(value.options))}
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value
