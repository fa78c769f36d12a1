"""Reading configurations: YAML and JSON, and scripts of Python, which are parsed and never run."""

import ast
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from lightning_rl.translation.values import Code, Named


class UnreadableError(Exception):
    """A file is no configuration."""


def read_mapping(path: Path) -> dict[str, Any]:
    """A file of YAML or JSON as a mapping.

    Raises:
        UnreadableError: saying what is wrong with it.
    """
    if not path.is_file():
        raise UnreadableError(f"expected {path} to be a file, got {'a folder' if path.is_dir() else 'none'}")
    try:
        text = path.read_text(encoding="utf-8")
        options: dict[str, Any] = {"object_pairs_hook": _once}
        values = json.loads(text, **options) if path.suffix == ".json" else _Once(text).get_single_data()
    except (OSError, UnicodeDecodeError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UnreadableError(f"expected {path} to be YAML or JSON, got an error: {error}") from error
    if values is None:
        raise UnreadableError(f"expected {path} to hold options by name, got nothing")
    if not isinstance(values, dict):
        raise UnreadableError(f"expected {path} to hold options by name, got {type(values).__name__}")
    if unnamed := [name for name in values if not isinstance(name, str)]:
        raise UnreadableError(f"expected {path} to hold options by name, got {unnamed[0]!r} as a name")
    return values


def _once(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """A mapping in which nothing is said twice."""
    values = dict[Any, Any]()
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name} stands there twice")
        values[name] = value
    return values


class _Once(yaml.SafeLoader):
    """Plain values alone, and no key twice."""

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping; what is merged into it by ``<<`` may be said once more."""
        _once([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"])
        return super().construct_mapping(node, deep)


class Script:
    """A script of Python: its calls, what its names are bound to, and the statements that an expression needs.

    Only what stands at the top level or in the function around a call is followed; nothing is ever executed.

    Args:
        text: of the script.

    Raises:
        UnreadableError: if it is no Python.
    """

    def __init__(self, text: str) -> None:
        try:
            self._tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise UnreadableError(f"expected a script of Python, got an error: {error}") from error
        self._text, self._lines = text, text.splitlines()
        self._bindings: dict[str, list[ast.stmt]] = {}
        self._entered: list[ast.FunctionDef] = []
        self._bind(self._tree.body)
        self._carried: list[ast.stmt] = []
        self._wanted: set[str] = set()

    def call(self, name: str) -> ast.Call | None:
        """The one call of a class, whatever module it comes from; None if there is none.

        Raises:
            UnreadableError: if there are several.
        """
        calls = [node for node in ast.walk(self._tree) if isinstance(node, ast.Call) and _last_name(node.func) == name]
        if len(calls) > 1:
            lines = ", ".join(str(call.lineno) for call in calls)
            raise UnreadableError(f"expected one {name}(...) in the script, got {len(calls)} in lines {lines}")
        if calls:
            for function in ast.walk(self._tree):
                around = isinstance(function, ast.FunctionDef) and calls[0] in ast.walk(function)
                if isinstance(function, ast.FunctionDef) and around and function not in self._entered:
                    self._entered.append(function)
                    self._bind(function.body)
        return calls[0] if calls else None

    def arguments(self, call: ast.Call, places: Sequence[str] = ()) -> dict[str, Any]:
        """The arguments of a call by name: plain values where they are written out, otherwise :class:`ast.expr`.

        Args:
            call: in this script.
            places: names of the arguments that may stand without.

        Raises:
            UnreadableError: if ``*`` or ``**`` hides some.
        """
        arguments: dict[str, Any] = {}
        for number, value in enumerate(call.args):
            if isinstance(value, ast.Starred) or number >= len(places):
                raise UnreadableError(f"expected arguments by name in line {call.lineno}, got {ast.unparse(value)}")
            arguments[places[number]] = self.value(value)
        for keyword in call.keywords:
            if keyword.arg is not None and keyword.arg in arguments:
                raise UnreadableError(f"expected {keyword.arg} once in line {call.lineno}, got it twice")
            if keyword.arg is not None:
                arguments[keyword.arg] = self.value(keyword.value)
                continue
            mapping = self.value(keyword.value)
            if not isinstance(mapping, dict):
                raise UnreadableError(
                    f"expected the options in line {call.lineno} to be written out, got **{ast.unparse(keyword.value)}"
                )
            arguments |= mapping
        return arguments

    def value(self, node: ast.expr) -> Any:
        """A plain value if the expression is one once its names are followed, otherwise the expression."""
        try:
            return ast.literal_eval(self.follow(node))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass
        if isinstance(node, ast.Dict | ast.List | ast.Tuple):
            try:
                return ast.literal_eval(_Follow(self).visit(ast.parse(ast.unparse(node), mode="eval").body))
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                return node
        return node

    def follow(self, node: ast.expr) -> ast.expr:
        """The expression that a name stands for, if it is bound once, by an assignment."""
        seen: set[str] = set()
        while isinstance(node, ast.Name) and node.id not in seen:
            seen.add(node.id)
            bound = self._bindings.get(node.id, [])
            if len(bound) != 1 or not isinstance(bound[0], ast.Assign) or len(bound[0].targets) != 1:
                return node
            if not isinstance(bound[0].targets[0], ast.Name):
                return node
            node = bound[0].value
        return node

    def carry(self, node: ast.expr) -> Code | Named:
        """An expression for another script: by its dotted name if it is imported, else with the statements it needs.

        Raises:
            UnreadableError: if it needs the trainer's configuration, or the trainer itself.
        """
        if isinstance(node, ast.Name):
            bound = self._bindings.get(node.id, [])
            if len(bound) == 1 and isinstance(bound[0], ast.ImportFrom) and not bound[0].level:
                (alias,) = [alias for alias in bound[0].names if (alias.asname or alias.name) == node.id]
                if alias.asname is None:
                    return Named(f"{bound[0].module}.{alias.name}")
        self._wanted |= set(_names(node))
        self._carry(_names(node))
        written = ast.get_source_segment(self._text, node) or ""
        return Code(written if written and "\n" not in written else ast.unparse(node))

    def statements(self) -> list[str]:
        """What the carried expressions need, in the order of the script, as it is written there."""
        return [self._source(statement) for statement in sorted(self._carried, key=lambda statement: statement.lineno)]

    def _carry(self, names: Iterable[str]) -> None:
        for name in names:
            for statement in self._bindings.get(name, []):
                if statement in self._carried:
                    continue
                made = {_last_name(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)}
                if made & {"GRPOConfig", "GRPOTrainer"} and not isinstance(statement, ast.FunctionDef | ast.ClassDef):
                    raise UnreadableError(f"line {statement.lineno} makes it from the trainer or its configuration")
                self._carried.append(statement)
                self._carry(_names(statement))

    def _bind(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            for name in _bound_names(statement):
                self._bindings.setdefault(name, []).append(statement)

    def _source(self, statement: ast.stmt) -> str:
        if isinstance(statement, ast.ImportFrom | ast.Import):
            needed = self._wanted | {
                name for other in self._carried if other is not statement for name in _names(other)
            }
            kept = [alias for alias in statement.names if (alias.asname or alias.name).partition(".")[0] in needed]
            names = ", ".join(alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in kept)
            if isinstance(statement, ast.Import):
                return f"import {names}"
            return f"from {'.' * statement.level}{statement.module or ''} import {names}"
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
        return textwrap.dedent("\n".join(self._lines[first - 1 : statement.end_lineno]))


class _Follow(ast.NodeTransformer):
    """Puts what names stand for in their place."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.script.follow(node)


def _names(node: ast.AST) -> Iterator[str]:
    """The names that an expression or statement reads, once each, in their order."""
    names = (part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load))
    return iter(dict.fromkeys(names))


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement binds, or whose objects it changes by an assignment."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            yield (alias.asname or alias.name).partition(".")[0]
    elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Name):
                    yield part.id


def _last_name(node: ast.expr) -> str:
    """What a function is called by, without the module before it."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
