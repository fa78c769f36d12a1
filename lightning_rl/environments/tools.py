"""Environments of tools: functions, or an object as for TRL's ``environment_factory``, that the policy calls.

Schemas come from signatures and Google-style docstrings by ``transformers.utils.get_json_schema``, and jsonschema
validates arguments. An invalid call, or a result that is no data, is returned to the policy as an error and counted.
"""

import asyncio
import dataclasses
import inspect
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers.utils.chat_template_utils import get_json_schema
from typing_extensions import override

from lightning_rl.data.pictures import is_picture
from lightning_rl.data.row_schema import has_pictures, tool_schema
from lightning_rl.environments.environment import Action, Environment, StepResult, ToolCall
from lightning_rl.processes.errors import CallError
from lightning_rl.rewards.optional_imports import require
from lightning_rl.samples import Message
from lightning_rl.utils.arguments import check_counts
from lightning_rl.utils.event_loop import EventLoop
from lightning_rl.utils.naming import name_of
from lightning_rl.utils.tracing import Span

Tool = Callable[..., Any]
Content = str | list[dict[str, Any]]  # of a message: a text, or parts with pictures
LOOP = EventLoop("async tools")  # of the process, so that connections remain usable in later turns
MAX_CHARACTERS = 16_384
WORDLESS = (object.__str__, bytes.__str__, bytearray.__str__)  # their text is Python's representation
KEYS = ("name", "description", "parameters", "strict", "return", "returns")  # of a function's schema
NO_TOOLS = ("reset", "get_reward", "close")  # methods that are not tools


@dataclasses.dataclass(frozen=True)
class JsonTool:
    """Tool with a JSON schema, as of verl, OpenAI or the Model Context Protocol, and the function that it calls.

    Args:
        function: Function that takes the arguments by name; a coroutine function is awaited.
        schema: ``{"type": "function", "function": {...}}``, its inner mapping, or ``{"name": ..., "inputSchema":
            ...}``, also with ``input_schema``.

    Raises:
        ValueError: If the function cannot be called, or the schema has no name or an unknown key.

    Example:
        >>> schema = {"name": "double", "inputSchema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
        >>> JsonTool(lambda x: 2 * x, schema)(x=21)
        42
    """

    function: Callable[..., Any]
    schema: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Check the function and bring the schema into the form of chat templates."""
        if not callable(self.function):
            raise ValueError(
                f"expected the function of a tool, got {self.function!r:.200}: pass JsonTool(function, schema)"
            )
        schema = tool_schema(self.schema)
        outer = self.schema.keys() - {"type", "function"} if "function" in self.schema else set()
        if unknown := sorted(outer | (schema["function"].keys() - KEYS)):
            raise ValueError(
                f"expected the schema of tool {schema['function']['name']} to have {', '.join(KEYS)}, got "
                f"{', '.join(map(str, unknown))}: describe the arguments in parameters, and leave other keys out"
            )
        object.__setattr__(self, "schema", schema)
        object.__setattr__(self, "__name__", self.schema["function"]["name"])

    def __call__(self, **arguments: Any) -> Any:
        """Call the function."""
        return self.function(**arguments)


class ToolEnvironment(Environment):
    """Environment that runs the calls of an answer; an answer without a call ends the conversation.

    Calls run in order; consecutive coroutines are awaited together, in an event loop in a separate thread. A text is
    returned as it is, other values as JSON; a value that is neither, such as a set or a generator, is an error.

    Args:
        tools: Functions with a type hint and a line under ``Args:`` for each argument; coroutine functions are
            awaited. A :class:`JsonTool` has a JSON schema instead.
        max_characters: Maximum number of characters of a result, after which it is cut with a note; None for no limit.

    Raises:
        ImportError: If jsonschema is missing; says how to install it.
        ValueError: If two tools share a name, or one has no valid schema; says which and why.

    Example:
        >>> def double(number: int) -> int:
        ...     '''Doubles a number.
        ...
        ...     Args:
        ...         number: any.
        ...     '''
        ...     return 2 * number
        >>> call = ToolCall(name="double", arguments={"number": 21})
        >>> ToolEnvironment([double]).step(Action(text="", tool_calls=[call])).messages[0]["content"]
        '42'
    """

    def __init__(self, tools: Sequence[Tool], *, max_characters: int | None = MAX_CHARACTERS) -> None:
        require("jsonschema", extra="tools")
        check_counts(1, optional=True, max_characters=max_characters)
        self.tools, self.max_characters = tuple(tools), max_characters
        names = Counter(name_of(tool) for tool in self.tools)
        if twice := sorted(name for name, number in names.items() if number > 1):
            raise ValueError(f"expected tools of different names, got {', '.join(twice)} more than once: rename one")
        self._by_name = {name_of(tool): tool for tool in self.tools}
        self._validators = {
            schema["function"]["name"]: _validator(schema["function"]["name"], schema["function"].get("parameters", {}))
            for schema in schemas_of(self.tools)
        }

    @override
    def step(self, answer: Action) -> StepResult:
        """Run the calls of the answer in order; none if it was truncated."""
        if answer.truncated or not (answer.tool_calls or answer.errors):
            return StepResult(done=True, reward=self.reward())
        results = self._run(answer.tool_calls)
        replies = [self._reply(call, result) for call, result in zip(answer.tool_calls, results, strict=True)]
        unread = [{"role": "tool", "name": "error", "content": self._cut(_error(error))} for error in answer.errors]
        errors = sum(isinstance(result, BaseException) for result in results)
        return StepResult(messages=[*replies, *unread], metrics={"tool_errors": float(errors)})

    def _run(self, calls: Sequence[ToolCall]) -> list[Any]:
        """Return the content of each call, or its exception; consecutive coroutines are awaited together."""
        results, waiting = list[Any](), list[Any]()
        for call in calls:
            if not inspect.iscoroutinefunction(
                _function_of(self._by_name.get(call.name))
            ):  # it may depend on the calls before
                results, waiting = [*results, *gather(waiting)], []
            result = self._call(call)
            if inspect.isawaitable(result):
                waiting.append(result)
            else:
                results, waiting = [*results, *gather(waiting), result], []
        return [*results, *gather(waiting)]

    def _call(self, call: ToolCall) -> "Content | BaseException | Awaitable[Content]":
        known = {"gen_ai.tool.name": call.name} if call.name in self._by_name else {}  # others are texts of the policy
        name = " ".join(["execute_tool", *known.values()])
        span = Span(name, {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.type": "function", **known})
        try:
            with span.current():
                result = self._tool(call)(**call.arguments)
            if inspect.isawaitable(result):
                return _content_within(span, result)
            with span:
                return _content(result)
        except (Exception, SystemExit) as error:  # noqa: BLE001  any error is returned to the policy
            span.end(error)
            return error

    def _tool(self, call: ToolCall) -> Tool:
        """Return the tool of a call after validating the arguments."""
        if call.name not in self._by_name:
            raise LookupError(f"there is no tool {call.name}, only {', '.join(self._by_name)}")
        tool = self._by_name[call.name]
        inspect.signature(_function_of(tool)).bind(**call.arguments)
        wrong = sorted(self._validators[call.name].iter_errors(dict(call.arguments)), key=lambda error: error.json_path)
        if wrong:
            raise TypeError("; ".join(f"{error.json_path.removeprefix('$.')}: {error.message}" for error in wrong))
        return tool

    def _reply(self, call: ToolCall, result: Content | BaseException) -> Message:
        content = _error(str(CallError.of(result))) if isinstance(result, BaseException) else result
        number = {} if call.id is None else {"tool_call_id": call.id}
        cut = self._cut(content) if isinstance(content, str) else content
        return {"role": "tool", "name": call.name, **number, "content": cut}

    def _cut(self, text: str) -> str:
        limit = self.max_characters
        text = text.encode("utf-8", "replace").decode()  # replaces half surrogate pairs
        if limit is None or len(text) <= limit:
            return text
        return f"{text[:limit]}\n[cut: {limit} of {len(text)} characters]"


class ObjectEnvironment(ToolEnvironment):
    """Environment of an object as for TRL's ``environment_factory``: the public methods of its class are tools.

    ``reset(**row)`` begins a conversation; a returned string is appended to the last message of the row. A ``reset``
    with named arguments gets only those, including ``seed``. ``get_reward()``, if defined, scores the conversation at
    its end. Either may be a coroutine function. ``close()`` is called at the end.

    Args:
        thing: Object.
        max_characters: As in :class:`ToolEnvironment`.

    Raises:
        ValueError: If it has no ``reset``, or as in :class:`ToolEnvironment`.
    """

    def __init__(self, thing: object, *, max_characters: int | None = MAX_CHARACTERS) -> None:
        if not callable(getattr(thing, "reset", None)):
            raise ValueError(
                "expected an environment to be an Environment, a TokenEnvironment or an object with a reset method, "
                f"got {type(thing).__name__}: write def reset(self, **row)"
            )
        self.thing = thing
        names = [name for name, _ in inspect.getmembers(type(thing), inspect.isfunction)]  # evaluates no property
        tools = [getattr(thing, name) for name in names if not name.startswith("_") and name not in NO_TOOLS]
        super().__init__(tools, max_characters=max_characters)

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        reset: Callable[..., Any] = self.thing.reset  # pyrefly: ignore[missing-attribute]
        first = result_of(reset(**_columns_for(reset, row, seed)))
        if first is None:
            return ()
        if not isinstance(first, str):
            raise TypeError(f"expected {type(self.thing).__name__}.reset to return a string or None, got {first!r}")
        prompt = row.get("prompt")
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt or ()]
        if said and said[-1].get("role") == "user" and isinstance(said[-1].get("content"), str):
            return [*said[:-1], {**said[-1], "content": f"{said[-1]['content']}{first}"}]
        return [*said, {"role": "user", "content": first}]

    @override
    def reward(self) -> float | None:
        score = getattr(self.thing, "get_reward", None)
        value = None if score is None else result_of(score())
        return None if value is None else float(value)

    @override
    def close(self) -> None:
        result_of(getattr(self.thing, "close", lambda: None)())


def begins_itself(environment: Environment) -> bool:
    """Return True if an environment may begin with its own messages instead of the row's prompt."""
    return type(environment).reset is not Environment.reset and not isinstance(environment, ObjectEnvironment)


def schemas_of(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the JSON schema of each tool, as in chat templates.

    Raises:
        ValueError: If signature or docstring is incomplete; names the tool and the fault.
    """
    schemas: list[dict[str, Any]] = []
    for tool in tools:
        if isinstance(tool, JsonTool):
            schemas.append(dict(tool.schema))
            continue
        if not callable(tool) or not hasattr(tool, "__name__"):
            cure = "a function with a name, hints and a docstring that calls it"
            if isinstance(tool, Mapping):
                cure = "JsonTool(function, schema) with the function that it calls"
            raise ValueError(
                f"expected each tool to be a function or a method, got an object of class {type(tool).__name__}: write "
                f"{cure}"
            )
        _check_names(tool)
        try:
            schemas.append(get_json_schema(tool))
        except Exception as error:
            raise ValueError(
                f"expected a hint and a line under Args: for each argument of tool {name_of(tool)}, got a function "
                f"without a schema: {error}"
            ) from error
    return schemas


def _function_of(tool: Any) -> Any:
    return tool.function if isinstance(tool, JsonTool) else tool


def _check_names(tool: Tool) -> None:
    """Check that every parameter of a tool has a name by which the policy can pass it."""
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(
                f"expected parameters of tool {name_of(tool)} that are passed by name, got {parameter} in "
                f"{name_of(tool)}{inspect.signature(tool)}: write a parameter with a name for each, or one list"
            )


def has_schema(function: Any) -> bool:
    """Return True if a function can be a tool."""
    try:
        schemas_of([function])
    except ValueError:
        return False
    return True


def _validator(name: str, schema: Any) -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(
            f"expected a JSON schema of the arguments of tool {name}, got {error.message} at {error.json_path}: "
            "correct it"
        ) from error
    return Draft202012Validator(_nullable(schema))


def _nullable(schema: Any) -> Any:
    """Return a schema with ``nullable``, which is not in JSON Schema, replaced by an alternative."""
    if isinstance(schema, list):
        return [_nullable(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    plain = {key: _nullable(part) for key, part in schema.items() if key != "nullable" or part is not True}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain


def _columns_for(reset: Callable[..., Any], row: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the columns that a reset accepts: all, or the named ones."""
    parameters = inspect.signature(reset).parameters
    columns = {"seed": seed, **row} if "seed" in parameters else dict(row)
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return columns
    return {name: value for name, value in columns.items() if name in parameters}


async def _content_within(span: Span, result: Awaitable[Any]) -> Content:
    """Await the result of a call, and return it as content of a message; the span ends then."""
    with span:
        return _content(await result)


def _content(value: Any) -> Content:
    """Return a text, or parts for a picture, pictures and texts in a list, or parts with pictures."""
    values = value if isinstance(value, list | tuple) else [value]
    if has_pictures(value):
        return [dict(part) for part in value]
    if any(map(is_picture, values)):
        return [
            {"type": "image", "image": each} if is_picture(each) else {"type": "text", "text": _text(each)}
            for each in values
        ]
    return _text(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False, default=_data)


def _data(value: Any) -> Any:
    """Convert arrays, collections and objects with a ``__str__`` for JSON.

    Raises:
        TypeError: For others, such as a set, whose order differs between processes.
    """
    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview, range)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if type(value).__str__ in WORDLESS:
        raise TypeError(f"expected a tool to return text or JSON data, got {type(value).__name__}")
    return str(value)


def _error(text: str) -> str:
    return json.dumps({"error": text}, ensure_ascii=False)


def gather(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """Await all together in the event loop of tools, and return the results or exceptions in order.

    Raises:
        RuntimeError: If called in the thread of the loop, which would wait for itself.
    """
    return LOOP.run(_gather(awaitables)) if awaitables else []


async def _gather(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*awaitables, return_exceptions=True)


def result_of(value: Any) -> Any:
    """Return a value, or the result of an awaitable, and raise its exception."""
    if not inspect.isawaitable(value):
        return value
    (result,) = gather([value])
    if isinstance(result, BaseException):
        raise result
    return result
