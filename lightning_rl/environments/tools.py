"""Tools: functions that the policy calls, as an environment, and objects of the shape of TRL's ``environment_factory``.

Schemas come from signatures and Google-style docstrings by ``transformers.utils.get_json_schema``, and jsonschema
checks arguments against them. Whatever is wrong with a call goes back to the policy as a message, and is counted;
so is a result that is no data.
"""

import dataclasses
import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers.utils.chat_template_utils import get_json_schema
from typing_extensions import override

from lightning_rl.arguments import check_counts
from lightning_rl.environments.coroutines import Raised, gather, result_of
from lightning_rl.environments.environment import Answer, Environment, Message, Step, ToolCall
from lightning_rl.environments.failure import words_of
from lightning_rl.rewards.extras import require

Tool = Callable[..., Any]
MAX_CHARACTERS = 16_384
WORDLESS = (object.__str__, bytes.__str__, bytearray.__str__)  # which write what Python would, not a text
NO_TOOLS = ("reset", "get_reward", "close")  # what an object's conversation needs, not its policy


class ToolEnvironment(Environment):
    """Runs the calls of an answer and says what came of them; an answer without a call ends the conversation.

    Calls are made in their order. Coroutines that follow each other wait together, in an event loop of a thread of
    their own. Text goes to the policy as it is, any other value as JSON; what is neither, such as a set or a generator,
    is an error.

    Args:
        tools: functions with a hint and a line under ``Args:`` for each argument; a coroutine function is awaited.
        max_characters: of what a call says to the policy: the rest is cut, and a note says so; None for all of it.

    Raises:
        ImportError: if jsonschema is missing; the message says how to install it.
        ValueError: if two tools share a name, or one has no schema or cannot be called by it; the message says which
            and why.

    Example:
        >>> def double(number: int) -> int:
        ...     '''Doubles a number.
        ...
        ...     Args:
        ...         number: any.
        ...     '''
        ...     return 2 * number
        >>> call = ToolCall(name="double", arguments={"number": 21})
        >>> ToolEnvironment([double]).step(Answer(text="", tool_calls=[call])).messages[0]["content"]
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
            schema["function"]["name"]: _validator(schema["function"].get("parameters", {}))
            for schema in schemas_of(self.tools)
        }

    @override
    def step(self, answer: Answer) -> Step:
        """Calls what the answer asks for, in its order; nothing of an answer that was cut off."""
        if answer.cut_off or not (answer.tool_calls or answer.errors):
            return Step(done=True, reward=self.reward())
        results = list(map(_text_of, self._run(answer.tool_calls)))
        replies = [self._reply(call, result) for call, result in zip(answer.tool_calls, results, strict=True)]
        unread = [{"role": "tool", "name": "error", "content": self._cut(_error(error))} for error in answer.errors]
        errors = sum(isinstance(result, Raised) for result in results)
        return Step(messages=[*replies, *unread], metrics={"tool_errors": float(errors)})

    def _run(self, calls: Sequence[ToolCall]) -> list[Any]:
        """What each call returns, or a ``Raised``; neighbours that have to be awaited wait together."""
        results, waiting = list[Any](), list[Any]()
        for call in calls:
            if not inspect.iscoroutinefunction(self._by_name.get(call.name)):  # it sees what those before it did
                results, waiting = [*results, *gather(waiting)], []
            result = self._call(call)
            if inspect.isawaitable(result):
                waiting.append(result)
            else:
                results, waiting = [*results, *gather(waiting), result], []
        return [*results, *gather(waiting)]

    def _call(self, call: ToolCall) -> Any:
        try:
            tool = self._tool(call)
            return tool(**call.arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a tool raises is for the policy to read
            return Raised(error)

    def _tool(self, call: ToolCall) -> Tool:
        """The tool that a call names, if it takes the call's arguments."""
        if call.name not in self._by_name:
            raise LookupError(f"there is no tool {call.name}, only {', '.join(self._by_name)}")
        if not isinstance(call.arguments, Mapping):
            raise TypeError(f"expected arguments by name, got {call.arguments!r}")
        tool = self._by_name[call.name]
        inspect.signature(tool).bind(**call.arguments)
        wrong = sorted(self._validators[call.name].iter_errors(dict(call.arguments)), key=lambda error: error.json_path)
        if wrong:
            raise TypeError("; ".join(f"{error.json_path.removeprefix('$.')}: {error.message}" for error in wrong))
        return tool

    def _reply(self, call: ToolCall, result: str | Raised) -> Message:
        said = _error(_description(result.error)) if isinstance(result, Raised) else result
        name = {"role": "tool", "name": call.name}
        return {**name, **({} if call.id is None else {"tool_call_id": call.id}), "content": self._cut(said)}

    def _cut(self, text: str) -> str:
        limit = self.max_characters
        text = text.encode("utf-8", "replace").decode()  # half a surrogate pair is no text
        if limit is None or len(text) <= limit:
            return text
        return f"{text[:limit]}\n[cut: {limit} of {len(text)} characters]"


class ObjectEnvironment(ToolEnvironment):
    """An object of the shape that TRL's ``environment_factory`` makes: the public methods of its class are tools.

    ``reset(**row)`` begins a conversation; a string that it returns is put behind the last message of the row.
    ``get_reward()``,
    if there is one, scores it at its end. Either may be a coroutine function. A ``reset`` that names its arguments gets
    those alone, among them ``seed`` if it asks for it. ``close()`` is no tool, but called at the end.

    Args:
        thing: the object.
        max_characters: as of :class:`ToolEnvironment`.

    Raises:
        ValueError: if it has no ``reset``, or as :class:`ToolEnvironment`.
    """

    def __init__(self, thing: object, *, max_characters: int | None = MAX_CHARACTERS) -> None:
        if not callable(getattr(thing, "reset", None)):
            raise ValueError(
                "expected an environment to be an Environment, a TokenEnvironment or an object with a reset method, "
                f"got {type(thing).__name__}: write def reset(self, **row)"
            )
        self.thing = thing
        names = [
            name for name, _ in inspect.getmembers(type(thing), inspect.isfunction)
        ]  # of the class: no property runs
        tools = [getattr(thing, name) for name in names if not name.startswith("_") and name not in NO_TOOLS]
        super().__init__(tools, max_characters=max_characters)

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        reset: Callable[..., Any] = self.thing.reset  # pyright: ignore[reportAttributeAccessIssue]
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


def schemas_of(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The JSON schema of each tool, as chat templates take it.

    Raises:
        ValueError: naming the tool, and what its signature or docstring lacks, or which parameter no call can give.
    """
    schemas: list[dict[str, Any]] = []
    for tool in tools:
        if not callable(tool) or not hasattr(tool, "__name__"):
            raise ValueError(
                f"expected each tool to be a function or a method, got an object of class {type(tool).__name__}: write "
                "a function with a name, hints and a docstring that calls it"
            )
        try:
            schemas.append(get_json_schema(tool))
        except Exception as error:
            raise ValueError(
                f"expected a hint and a line under Args: for each argument of tool {name_of(tool)}, got a function "
                f"without a schema: {error}"
            ) from error
        _check_parameters(tool)
    return schemas


def has_schema(function: Any) -> bool:
    """Whether a function could be a tool."""
    try:
        schemas_of([function])
    except ValueError:
        return False
    return True


def _check_parameters(tool: Tool) -> None:
    """Refuses parameters that a schema names and no call by name can give.

    Raises:
        ValueError: naming the tool and the parameter.
    """
    kinds = inspect.Parameter
    odd = {kinds.VAR_POSITIONAL: "*{}", kinds.VAR_KEYWORD: "**{}", kinds.POSITIONAL_ONLY: "{}, /"}
    for name, parameter in inspect.signature(tool).parameters.items():
        if parameter.kind in odd:
            raise ValueError(
                f"expected tool {name_of(tool)} to take each argument by its name, got "
                f"{odd[parameter.kind].format(name)}: give every argument a parameter of its own, a list for several"
            )


def name_of(tool: Tool) -> str:
    """What the policy calls a tool."""
    return getattr(tool, "__name__", type(tool).__name__)


def _validator(schema: Mapping[str, Any]) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(_nullable(schema))


def _nullable(schema: Any) -> Any:
    """A schema whose ``nullable``, which JSON Schema does not know, is written as an alternative."""
    if isinstance(schema, list):
        return [_nullable(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    plain = {key: _nullable(part) for key, part in schema.items() if key != "nullable" or part is not True}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain


def _columns_for(reset: Callable[..., Any], row: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The columns that a reset takes: all, or those that it names."""
    parameters = inspect.signature(reset).parameters
    columns = {"seed": seed, **row} if "seed" in parameters else dict(row)
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return columns
    return {name: value for name, value in columns.items() if name in parameters}


def _text_of(result: Any) -> str | Raised:
    """What a call returned, in text, or what it or its text raised, such as an integer of too many digits."""
    if isinstance(result, Raised):
        return result
    try:
        return _text(result)
    except (Exception, SystemExit) as error:  # noqa: BLE001  as above
        return Raised(error)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False, default=_data)


def _data(value: Any) -> Any:
    """A value that JSON does not know as one that it does: arrays, collections, and what writes a text of its own.

    Raises:
        TypeError: for any other, such as a set, whose order differs from process to process.
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


def _description(error: BaseException) -> str:
    return f"{type(error).__name__}: {words_of(error)}"
