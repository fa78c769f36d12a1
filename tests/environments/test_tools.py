"""Tools: results and errors of calls are messages for the policy, and environments for TRL work unchanged."""

import asyncio
import dataclasses
import datetime
import json
import math
import re
import sys
from collections.abc import Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import cloudpickle
import numpy as np
import pytest
from environments.templates import close_of, tokenizer_of
from typing_extensions import override

from lightning_rl import FinishReason
from lightning_rl.environments import Action, Bridge, JsonTool, ObjectEnvironment, ToolCall, ToolEnvironment, parser_for
from lightning_rl.environments.messages import MessageEnvironment
from lightning_rl.environments.run_environments import factories_of
from lightning_rl.environments.tools import schemas_of


def add(a: int, b: int = 1) -> int:
    """Adds numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


def describe(word: str | None, how: Literal["long", "short"], parts: list[int] | None = None) -> Any:
    """Describes.

    Args:
        word: a word.
        how: at what length.
        parts: of the word.
    """
    return {"word": word, "how": how, "parts": parts}


def fail(what: str) -> str:
    """Fails.

    Args:
        what: how.
    """
    if what == "exit":
        sys.exit(3)
    raise OSError(what)


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def step(environment: ToolEnvironment, *calls: ToolCall, errors: Sequence[str] = ()) -> Any:
    return environment.step(Action(text="", tool_calls=calls, errors=errors))


def said(environment: ToolEnvironment, *calls: ToolCall) -> list[str]:
    return [message["content"] for message in step(environment, *calls).messages]


@dataclasses.dataclass
class Point:
    """A value that is data."""

    x: int


def returning(value: Any) -> Any:
    def give() -> Any:
        """Gives."""
        return value

    return give


def test_calls_are_made_in_their_order_and_named_in_the_replies() -> None:
    environment = ToolEnvironment([add, describe])
    calls = [ToolCall(name="add", arguments={"a": 2}, id="call7"), call("describe", word=None, how="long")]
    taken = step(environment, *calls)
    assert list(taken.messages) == [
        {"role": "tool", "name": "add", "tool_call_id": "call7", "content": "3"},
        {"role": "tool", "name": "describe", "content": '{"word": null, "how": "long", "parts": null}'},
    ]
    assert (taken.done, taken.reward, taken.metrics) == (False, None, {"tool_errors": 0.0})


def test_an_answer_without_a_call_ends_the_conversation() -> None:
    taken = step(ToolEnvironment([add]))
    assert (taken.done, list(taken.messages), taken.reward) == (True, [], None)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        ({"a": [1, None, True]}, '{"a": [1, null, true]}'),
        (None, "null"),
        (2.5, "2.5"),
        ("é", "é"),
        (["é"], '["é"]'),
        (np.float32(0.5), "0.5"),
        ({"a": np.arange(2)}, '{"a": [0, 1]}'),
        (datetime.date(2020, 1, 2), '"2020-01-02"'),
        (Point(1), '{"x": 1}'),
        (MappingProxyType({"a": 1}), '{"a": 1}'),
        ("half \ud800", "half ?"),
    ],
)
def test_text_is_said_as_it_is_and_values_as_json(value: Any, text: str) -> None:
    assert said(ToolEnvironment([returning(value)]), call("give")) == [text]


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (call("fly"), "LookupError: there is no tool fly, only add, describe, fail"),
        (call("add"), "TypeError: missing a required argument: 'a'"),
        (call("add", a=1, c=2), "TypeError: got an unexpected keyword argument 'c'"),
        (call("add", a="1"), "TypeError: a: '1' is not of type 'integer'"),
        (call("add", a=True), "TypeError: a: True is not of type 'integer'"),
        (call("add", a=1, b=None), "TypeError: b: None is not of type 'integer'"),
        (call("describe", word="w", how="wide"), "TypeError: how: 'wide' is not one of ['long', 'short']"),
        (call("describe", word="w", how="long", parts=[1, "2"]), "TypeError: parts: [1, '2'] is not valid under any"),
        (call("fail", what="gone"), "OSError: gone"),
        (call("fail", what="exit"), "SystemExit: 3"),
    ],
)
def test_what_is_wrong_with_a_call_goes_back_to_the_policy_and_is_counted(asked: ToolCall, error: str) -> None:
    taken = step(ToolEnvironment([add, describe, fail]), asked, call("add", a=1))
    wrong, right = taken.messages
    assert json.loads(wrong["content"])["error"].startswith(error) and wrong["name"] == asked.name
    assert (right["content"], taken.metrics, taken.done) == ("2", {"tool_errors": 1.0}, False)


def test_what_no_parser_read_goes_back_too() -> None:
    taken = step(ToolEnvironment([add]), call("add", a=1), errors=["no JSON"])
    assert [message["content"] for message in taken.messages] == ["2", '{"error": "no JSON"}']
    taken = step(ToolEnvironment([add]), errors=["no JSON"])
    assert (taken.done, taken.metrics) == (False, {"tool_errors": 0.0})


def test_nothing_of_an_answer_that_was_cut_is_called() -> None:
    answer = Action(text="", tool_calls=[call("fail", what="called")], finish=FinishReason.LENGTH)
    taken = ToolEnvironment([fail]).step(answer)
    assert taken.done and list(taken.messages) == []


def test_a_flood_is_cut_with_a_note() -> None:
    flood = returning("ab" * 50)
    assert said(ToolEnvironment([flood], max_characters=3), call("give")) == ["aba\n[cut: 3 of 100 characters]"]
    assert said(ToolEnvironment([flood], max_characters=100), call("give")) == ["ab" * 50]
    assert said(ToolEnvironment([flood], max_characters=None), call("give")) == ["ab" * 50]
    assert len(said(ToolEnvironment([returning("a" * 10**6)]), call("give"))[0]) < 17_000
    (error,) = said(ToolEnvironment([fail], max_characters=20), call("fail", what="x" * 99))
    assert error.startswith('{"error": "OSError: ') and "[cut: 20 of " in error


def test_coroutines_that_follow_each_other_overlap_and_a_function_waits_for_them() -> None:
    events: list[str] = []

    async def slow(which: str) -> None:
        """Is slow.

        Args:
            which: of the calls.
        """
        events.append(f"begin {which}")
        await asyncio.sleep(0)
        events.append(f"end {which}")

    def note() -> None:
        """Notes."""
        events.append("note")

    step(ToolEnvironment([slow, note]), call("slow", which="a"), call("slow", which="b"), call("note"))
    assert events == ["begin a", "begin b", "end a", "end b", "note"]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([add, add], "expected tools of different names, got add more than once: rename one"),
        ([lambda x: x], "for each argument of tool <lambda>, got a function without a schema: .*docstring"),
        ([partial(add, 1)], "expected each tool to be a function or a method, got an object of class partial: write a"),
        (["add"], "expected each tool to be a function or a method, got an object of class str"),
    ],
)
def test_tools_without_a_name_or_a_schema_of_their_own_are_refused(tools: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        ToolEnvironment(tools)


class Counter:
    """As TRL's trainer takes it."""

    def __init__(self) -> None:
        self.count, self.closed = 0, False

    def reset(self, **row: Any) -> str | None:
        """Keeps the row."""
        self.row: Any = row
        return row.get("hint")

    def increase(self, by: int) -> str:
        """Increases the counter.

        Args:
            by: how much.
        """
        self.count += by
        return f"at {self.count}"

    async def look(self) -> int:
        """Looks at the counter."""
        return self.count

    def _hidden(self) -> None:
        raise AssertionError("it was called")

    @property
    def broken(self) -> int:
        """Must not be looked at."""
        raise AssertionError("it was evaluated")

    def get_reward(self) -> float:
        """Half of the count."""
        return self.count / 2

    def close(self) -> None:
        """Remembers it."""
        self.closed = True


def test_the_public_methods_of_an_object_are_tools() -> None:
    environment = ObjectEnvironment(Counter())
    assert [schema["function"]["name"] for schema in schemas_of(environment.tools)] == ["increase", "look"]
    assert said(environment, call("increase", by=3), call("look")) == ["at 3", "3"]
    assert (step(environment).done, step(environment).reward) == (True, 1.5)


ROW = {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "go"}], "hint": " on", "level": 2}


@pytest.mark.parametrize(
    ("row", "begins"),
    [
        (ROW, [{"role": "system", "content": "s"}, {"role": "user", "content": "go on"}]),
        ({**ROW, "hint": None}, []),
        ({**ROW, "prompt": "go"}, [{"role": "user", "content": "go on"}]),
        ({**ROW, "prompt": ROW["prompt"][:1]}, [ROW["prompt"][0], {"role": "user", "content": " on"}]),
        ({"hint": "on"}, [{"role": "user", "content": "on"}]),
    ],
)
def test_what_an_object_says_at_its_reset_is_put_behind_the_prompt(row: Any, begins: Any) -> None:
    thing = Counter()
    environment = ObjectEnvironment(thing)
    assert list(environment.reset(row, 5)) == begins and thing.row == row
    environment.close()
    assert thing.closed and ROW["prompt"][1] == {"role": "user", "content": "go"}


class Awaiting(Counter):
    """Names what it wants, and has to be awaited."""

    @override
    async def reset(self, level: int, seed: int) -> None:  # pyrefly: ignore[bad-override]
        self.row = (level, seed)

    @override
    async def get_reward(self) -> float:  # pyrefly: ignore[bad-override]
        return 0.25


def test_a_reset_that_names_its_columns_gets_those_and_may_be_awaited() -> None:
    thing = Awaiting()
    environment = ObjectEnvironment(thing)
    assert (list(environment.reset(ROW, 5)), thing.row) == ([], (2, 5))
    assert step(environment).reward == 0.25


class Mute:
    """Has tools alone."""

    def reset(self) -> Any:
        """No text."""
        return 3


def test_an_object_of_another_shape_is_told_what_it_lacks() -> None:
    with pytest.raises(ValueError, match=r"an object with a reset method, got int: write def reset\(self, \*\*row\)"):
        ObjectEnvironment(3)
    with pytest.raises(TypeError, match=r"expected Mute\.reset to return a string or None, got 3"):
        ObjectEnvironment(Mute()).reset({}, 0)
    assert step(ObjectEnvironment(Mute())).reward is None


def drawn(text: str, finish: FinishReason = FinishReason.STOP) -> tuple[list[int], FinishReason]:
    return list(tokenizer_of("qwen3")(text, add_special_tokens=False)["input_ids"]), finish


def test_a_conversation_with_tools_goes_from_tokens_to_tokens() -> None:
    tokenizer, tool = tokenizer_of("qwen3"), ToolEnvironment([add])
    bridge = Bridge(tokenizer, close_of("qwen3"))
    prompt = [{"role": "user", "content": "one"}]
    talk = MessageEnvironment(tool, bridge, parser_for(tokenizer, "hermes"), schemas_of(tool.tools), prompt)
    assert '"name": "add"' in tokenizer.decode(list(talk.reset({}, 0)))
    first = talk.step(*drawn('So.\n<tool_call>{"name": "add", "arguments": {"a": 4}}</tool_call><|im_end|>'))
    expected = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(list(first.token_ids)) == expected
    assert first.metrics == {"tool_calls": 1.0, "parse_errors": 0.0, "tool_errors": 0.0}
    broken = talk.step(*drawn('<tool_call>{"name": "add"</tool_call><|im_end|>'))
    assert "a tool call could not be read" in tokenizer.decode(list(broken.token_ids))
    assert broken.metrics == {"tool_calls": 0.0, "parse_errors": 1.0, "tool_errors": 0.0}
    cut = talk.step(*drawn('<tool_call>{"name": "add", "arguments": {"a": 4}}</tool_call>', FinishReason.LENGTH))
    assert (cut.done, cut.metrics["tool_calls"], cut.metrics["parse_errors"]) == (True, 0.0, 0.0)
    thought = talk.step(*drawn('<think>\nhm <tool_call>{"name": "add"', FinishReason.LENGTH)).messages[0]
    assert (thought["content"], thought["reasoning_content"]) == ("", 'hm <tool_call>{"name": "add"')


@pytest.mark.parametrize(
    "value",
    [{"a": {2}}, object(), (one for one in "a"), b"a", math.nan, {(1, 2): 3}],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_data_is_an_error_for_the_policy_to_read_without_addresses(value: Any) -> None:
    taken = step(ToolEnvironment([returning(value)]), call("give"))
    (message,) = taken.messages
    assert set(json.loads(message["content"])) == {"error"} and " at 0x" not in message["content"]
    assert taken.metrics == {"tool_errors": 1.0}


def positional(a: int, /) -> int:
    """Gives.

    Args:
        a: one.
    """
    return a


def many(*a: int) -> int:
    """Gives.

    Args:
        a: some.
    """
    return sum(a)


def options(**a: int) -> int:
    """Gives.

    Args:
        a: some.
    """
    return len(a)


@pytest.mark.parametrize(("tool", "parameter"), [(positional, "a: int"), (many, "*a: int"), (options, "**a: int")])
def test_a_tool_whose_arguments_have_no_names_is_refused(tool: Any, parameter: str) -> None:
    message = f"expected parameters of tool {tool.__name__} that are passed by name, got {parameter} in"
    with pytest.raises(ValueError, match=re.escape(message)):
        ToolEnvironment([tool])
    with pytest.raises(ValueError, match=re.escape(message)):
        ObjectEnvironment(type("Thing", (), {"reset": Mute.reset, tool.__name__: staticmethod(tool)})())


PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
INNER = {"name": "look-up", "description": "Looks.", "parameters": PARAMETERS}
MCP = {"name": "look-up", "description": "Looks.", "inputSchema": PARAMETERS, "annotations": {"title": "Look"}}


@pytest.mark.parametrize("schema", [{"type": "function", "function": INNER}, INNER, MCP], ids=["verl", "inner", "mcp"])
@pytest.mark.parametrize("awaited", [False, True], ids=["function", "coroutine"])
def test_a_tool_has_a_json_schema_beside_functions(schema: Any, awaited: bool) -> None:
    async def coroutine(**arguments: Any) -> int:
        return 2 * arguments["x"]

    function: Any = coroutine if awaited else lambda x: 2 * x
    environment = ToolEnvironment([add, JsonTool(function, schema)])
    assert schemas_of(environment.tools)[1] == {"type": "function", "function": INNER}
    replies = said(environment, call("look-up", x=4), call("add", a=1), call("look-up", x="4"), call("look-up"))
    assert replies[:2] == ["8", "2"] and "'4' is not of type 'integer'" in replies[2] and "x" in replies[3]
    cloudpickle.loads(cloudpickle.dumps(environment))


def test_a_bare_mapping_of_arguments_is_the_schema_of_an_object() -> None:
    tool = JsonTool(lambda city: city, {"name": "find", "parameters": {"city": {"type": "string"}}})
    assert "4 is not of type 'string'" in said(ToolEnvironment([tool]), call("find", city=4))[0]


def test_a_schema_without_a_function_is_refused_with_what_to_write() -> None:
    for make in (lambda: ToolEnvironment([MCP]), lambda: factories_of([add, MCP])):  # pyrefly: ignore[bad-argument-type]
        with pytest.raises(ValueError, match=r"JsonTool\(function, schema\)"):
            make()
    with pytest.raises(ValueError, match='expected a JSON schema with a "name", got'):
        JsonTool(add, {"type": "object"})


@pytest.mark.parametrize(("written", "error"), [('"6"', "'6' is not of type 'integer'"), ('"null"', "'null' is not")])
def test_arguments_are_validated_as_they_are_written(written: str, error: str) -> None:
    tokenizer, tool = tokenizer_of("qwen3"), ToolEnvironment([add, describe])
    prompt = [{"role": "user", "content": "one"}]
    parse = parser_for(tokenizer, "hermes")
    talk = MessageEnvironment(tool, Bridge(tokenizer, close_of("qwen3")), parse, schemas_of(tool.tools), prompt)
    talk.reset({}, 0)
    taken = talk.step(*drawn(f'<tool_call>{{"name": "add", "arguments": {{"a": {written}}}}}</tool_call><|im_end|>'))
    assert taken.metrics["tool_errors"] == 1.0 and error in str(taken.messages[-1]["content"])
    word = '<tool_call>{"name": "describe", "arguments": {"word": "null", "how": "long"}}</tool_call><|im_end|>'
    assert '"word": "null"' in str(talk.step(*drawn(word)).messages[-1]["content"])


INTEGER = {"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"name": "get", "parameters": INTEGER},
        {"type": "function", "name": "get", "parameters": INTEGER, "strict": True},
        {"type": "function", "function": {"name": "get", "description": "Gets.", "parameters": INTEGER}},
        {"name": "get", "inputSchema": INTEGER, "title": "Get", "annotations": {}, "outputSchema": None},
        {"name": "get", "input_schema": INTEGER},
        {"type": "custom", "name": "get", "description": "Gets.", "input_schema": INTEGER, "cache_control": {}},
        {"type": "function", "function": {"name": "get", "input_schema": INTEGER}},
    ],
)
def test_the_schema_of_arguments_is_read_under_each_of_its_names(schema: dict[str, Any]) -> None:
    tool = JsonTool(lambda q: q, schema)
    assert tool.schema["function"]["parameters"] == INTEGER and "type" not in tool.schema["function"]
    calls = [ToolCall(name="get", arguments=arguments) for arguments in ({"q": 1}, {"q": "1"})]
    right, wrong = ToolEnvironment([tool]).step(Action(text="", tool_calls=calls)).messages
    assert right["content"] == "1" and "is not of type" in wrong["content"]


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"name": "get", "inputschema": INTEGER}, "got inputschema"),
        ({"name": "get", "args": INTEGER}, "got args"),
        ({"name": "get", "properties": {}, "required": []}, "got properties, required"),
        ({"type": "function", "function": {"name": "get"}, "parameters": INTEGER}, "got parameters"),
        ({"name": "get", "parameters": INTEGER, "input_schema": INTEGER}, 'got "parameters", "input_schema"'),
    ],
)
def test_a_schema_with_an_unknown_key_is_refused_by_its_name(schema: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=f"tool get.*{fault}"):
        JsonTool(lambda q: q, schema)


@pytest.mark.parametrize("parameters", [{"type": "thing"}, [1], {"properties": {"q": {"type": "int"}}}])
def test_arguments_without_a_valid_schema_are_refused_at_setup(parameters: Any) -> None:
    with pytest.raises(ValueError, match="JSON schema of the arguments of tool get"):
        ToolEnvironment([JsonTool(lambda q: q, {"name": "get", "parameters": parameters})])
