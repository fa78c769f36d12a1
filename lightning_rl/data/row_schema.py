"""Form of rows: the prompt column, chat options, and the columns left for the rewards."""

import ast
import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from lightning_rl.data.pictures import PARTS
from lightning_rl.utils.arguments import check_bools
from lightning_rl.utils.keys import hide_secrets
from lightning_rl.utils.naming import check_columns, in_words, name_of

CONTENT = ("prompt", "messages")  # valid names of the prompt column
QUESTIONS = ("question", "problem", "instruction", "query", "input", "text")  # its names in common data sets
RENDERING = (
    "add_generation_prompt",
    "conversation",
    "return_dict",
    "return_tensors",
    "tokenize",
)

LISTED = re.compile(r"\s*\[\s*\{")
BEGUN = re.compile(LISTED.pattern + r"\s*([\"'])(role|content)\1\s*:")
PARAMETERS = ("parameters", "inputSchema", "input_schema")  # names of the schema of a tool's arguments
MCP_ONLY = ("title", "annotations", "outputSchema", "_meta", "meta", "icons", "execution", "cache_control")
TOOLS, VARIABLES, CONTINUES = "tools", "chat_template_kwargs", "continue_final_message"

ColumnCheck = Callable[[Mapping[str, Any], str], object]
"""Function of a row's columns and its name in errors; raises if the columns do not fit the run."""


class Reading(NamedTuple):
    """Prompt and other columns of a row, its name in error messages, with the prompt column, and its own variables of
    the chat template.
    """

    content: Any
    columns: dict[str, Any]
    name: str
    variables: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptForm:
    """Mapping from a row to its prompt and the columns for the rewards.

    Args:
        columns: Mapping from new to existing column names, such as ``{"prompt": "question"}``, or to entries of
            columns, such as ``{"answer": "reward_model.ground_truth"}``; others are unchanged.
        preprocess: Function from a row to the row to use, called first and on each read; must be deterministic.
        chat: True to turn a string prompt into the user message of a chat.
        system: System message of chats without one; turns a string prompt into a chat.
        chat_template_kwargs: Further variables of the tokenizer's chat template, such as ``{"enable_thinking":
            False}``.

    Raises:
        ValueError: If an option has an invalid value.
    """

    columns: Mapping[str, str] | None = None
    preprocess: Callable[[Any], Any] | None = None
    chat: bool = False
    system: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        check_bools(chat=self.chat)
        columns, variables = self.columns or {}, self.chat_template_kwargs or {}
        if not isinstance(columns, Mapping) or not all(isinstance(name, str) for name in columns.values()):
            example = '{"prompt": "question"}'
            raise ValueError(f"expected columns to map new names to names of columns, as {example}, got {columns!r}")
        if self.preprocess is not None and not callable(self.preprocess):
            raise ValueError(f"expected preprocess to be a function of a row, got {self.preprocess!r}")
        if self.system is not None and not isinstance(self.system, str):
            raise ValueError(f"expected system to be a string, got {self.system!r}: write the text alone")
        if not isinstance(variables, Mapping):
            raise ValueError(f"expected chat_template_kwargs to be a mapping, got {variables!r}")
        check_variables(variables, "")

    def check_names(self, names: Sequence[str] | Mapping[str, Any], where: str) -> None:
        """Check that the columns in the options exist, and that one can be the prompt.

        Raises:
            ValueError: With the missing column and the existing ones.
        """
        columns = self.columns or {}
        check_mapping(columns, names, where)
        renamed = list(dict.fromkeys([*columns, *(name for name in names if name not in columns.values())]))
        check_columns(renamed, where)
        content_column(renamed, where, columns)

    def read(self, row: Any, name: str) -> "Reading":
        """Return the prompt of a row as the model gets it, and the other columns; errors call the row ``name``.

        Raises:
            ValueError: If a value is invalid; with row, column and expected type.
        """
        if self.preprocess is not None:
            row = apply(self.preprocess, row, name)
        if not isinstance(row, Mapping):
            row = _chat_or_text(without_arrays(row), name)
            if self.columns:
                raise ValueError(
                    f"expected {name} to have columns, because columns={dict(self.columns)}, got a "
                    f"{type(row).__name__}: leave columns out"
                )
            return Reading(self._content(row, name, {}), {}, name)
        row = {key: without_arrays(value) for key, value in self._rename(row, name).items()}
        check_columns(row, name)
        column = content_column(row, name, self.columns or {})
        source = (self.columns or {}).get(column, column)
        place = f"{name[:-1]}, column {source})" if name.endswith(")") else f"{name} (column {source})"
        columns = {key: value for key, value in row.items() if key != column}
        content = _chat_or_text(row[column], place)
        variables = own_variables(columns, place) if self._is_chat(content) else {}
        return Reading(self._content(content, place, variables), columns, place, variables)

    def _rename(self, row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        if not self.columns:
            return row
        check_mapping(self.columns, row, name)
        sources = set(self.columns.values())
        kept = {key: value for key, value in row.items() if key not in sources}
        return kept | {new: _value(row, old, name) for new, old in self.columns.items()}

    def _is_chat(self, content: Any) -> bool:
        """Return True if the chat template writes a prompt."""
        if isinstance(content, str):
            return self.chat or self.system is not None
        return not is_token_ids(content)

    def _content(self, content: Any, name: str, variables: Mapping[str, Any]) -> Any:
        if isinstance(content, str):
            if self.system is None and not self.chat:
                self._check_variables("a string", name)
                return content
            content = [{"role": "user", "content": content}]
        if is_token_ids(content):
            if self.system is not None:
                raise ValueError(f"expected a string or chat messages, because system= is set, got token ids in {name}")
            self._check_variables("token ids", name)
            return content
        continues = variables.get(CONTINUES, (self.chat_template_kwargs or {}).get(CONTINUES))
        messages = read_messages(content, name, continues=bool(continues))
        if self.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        return messages

    def _check_variables(self, got: str, name: str) -> None:
        """Raise if there are chat template variables but no chat."""
        if self.chat_template_kwargs:
            raise ValueError(
                f"expected chat messages, because chat_template_kwargs={dict(self.chat_template_kwargs)} is set, got "
                f"{got} in {name}: pass chat=True to make a chat of a string, or leave chat_template_kwargs out"
            )


def apply(preprocess: Callable[[Any], Any], row: Any, name: str) -> Any:
    """Return the result of ``preprocess`` on a row.

    Raises:
        ValueError: If the function raises or returns None; with the name of the row.
    """
    try:
        result = preprocess(row)
    except Exception as error:
        function = name_of(preprocess)
        raise ValueError(
            f"expected preprocess={function} to return a row, but it failed on {name}: {hide_secrets(repr(error))}"
        ) from error
    if result is None:
        raise ValueError(
            f"expected preprocess={name_of(preprocess)} to return a row, got None for {name}: end it with return"
        )
    return result


def check_mapping(columns: Mapping[str, str], names: Sequence[str] | Mapping[str, Any], where: str) -> None:
    """Check that the columns in a mapping exist.

    Raises:
        ValueError: With the missing column and the existing ones.
    """
    for new, old in columns.items():
        if old not in names and old.partition(".")[0] not in names:
            near = [new] if new in names else difflib.get_close_matches(old, list(names), 1)
            cure = f'columns={{"{old if new in names else new}": "{near[0]}"}}' if near else "one of these in columns="
            raise ValueError(
                f'expected columns={dict(columns)} to name columns that exist, got no "{old}" in {where}, which has '
                f"{in_words(names)}: write {cure}"
            )


def _value(row: Mapping[str, Any], path: str, name: str) -> Any:
    """Return the value of a column, or of an entry within one for a path with dots, such as ``reward_model.answer``.

    An entry of None, as tables have for missing keys, is None.

    Raises:
        ValueError: If there is no such entry; with the row, the path and the entries.
    """
    if path in row:
        return row[path]
    value: Any = row
    for key in path.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping) or key not in value:
            got = in_words(value) if isinstance(value, Mapping) else _description(value)
            raise ValueError(f'expected an entry "{key}" of "{path}" in {name}, got {got}: correct it in columns=')
        value = value[key]
    return value


def without_arrays(value: Any) -> Any:
    """Return a value with NumPy arrays at any depth, which pandas makes of lists, as lists."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if type(value) is dict:
        return {key: without_arrays(item) for key, item in value.items()}
    return [without_arrays(item) for item in value] if type(value) is list else value


def without_none(value: Any) -> Any:
    """Return a value without entries of mappings that are None, at any depth; tables add them for missing keys."""
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list | tuple) else value


def content_column(
    names: Sequence[str] | Mapping[str, Any], where: str, columns: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the name of the prompt column; the user's mapping ``columns`` selects one of two candidates.

    Raises:
        ValueError: If there are no or two candidates; with the existing columns and the option to set.
    """
    present = [column for column in CONTENT if column in names]
    chosen = [column for column in present if column in columns] if len(present) > 1 else present
    if len(chosen) == 1:
        return chosen[0]
    if present:
        raise ValueError(
            f'expected one entry "prompt" or "messages", got both in {where}: select the prompt by '
            'columns={"prompt": "prompt"} or columns={"messages": "messages"}; rewards get the other one'
        )
    known = [name for name in QUESTIONS if name in names]
    cure = f'columns={{"prompt": "{known[0] if known else next(iter(names), "...")}"}}'
    raise ValueError(
        f'expected every row to have an entry "prompt" or "messages", got none in {where}, which has '
        f"{in_words(names)}: name the prompt column by {cure}"
    )


def is_token_ids(content: Any) -> bool:
    """Return True if a prompt is a list or tuple of integers, or empty."""
    if not isinstance(content, Sequence) or isinstance(content, str | bytes | bytearray):
        return False
    kinds = set(map(type, content))
    return all(kind is int or (kind is not bool and issubclass(kind, Integral)) for kind in kinds)


def check_variables(variables: Any, where: str) -> None:
    """Check variables of a chat template; ``where`` follows their name in errors.

    Raises:
        ValueError: If they are no mapping, or hold an option of the rendering.
    """
    if not isinstance(variables, Mapping):
        raise ValueError(f"expected {VARIABLES}{where} to be a mapping, got {variables!r:.200}")
    if reserved := sorted(set(RENDERING) & set(variables)):
        raise ValueError(
            f"expected {VARIABLES}{where} to hold variables of the chat template, got {in_words(reserved)}: "
            "leave it out, because a prompt always ends with the generation prompt"
        )


def own_variables(columns: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the variables of the chat template in the columns ``tools`` and ``chat_template_kwargs``, as of TRL.

    Raises:
        ValueError: If a column has another form; with the row.
    """
    variables, tools = (_parse(columns.get(column)) for column in (VARIABLES, TOOLS))
    variables = without_none(variables or {})
    check_variables(variables, f" of {name}")
    if not tools:
        return variables
    try:
        return {**variables, TOOLS: [tool_schema(without_none(tool)) for tool in tools]}
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"expected {TOOLS} of {name} to be a list of JSON schemas of functions for the chat template, got "
            f'{tools!r:.200}: correct them, or rename the column, as in columns={{"my_tools": "tools"}}'
        ) from error


def tool_schema(tool: Any) -> dict[str, Any]:
    """Return the schema of a tool in the form of chat templates, from this form, its function alone, or that of MCP.

    Raises:
        ValueError: If it is none of these, or has two schemas of arguments.
    """
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f'expected a JSON schema with a "name", got {tool!r:.200}')
    given = [key for key in PARAMETERS if function.get(key) is not None]
    if len(given) > 1:
        raise ValueError(f"expected one schema of the arguments of tool {function['name']}, got {in_words(given)}")
    left_out = {*PARAMETERS, *(MCP_ONLY if given != PARAMETERS[:1] else ()), *({"type"} if function is tool else ())}
    schema = {"parameters": _object_schema(function[given[0]])} if given else {}
    return {"type": "function", "function": {key: function[key] for key in function if key not in left_out} | schema}


def _object_schema(parameters: Any) -> Any:
    """Return the schema of arguments, also of a bare mapping of their schemas such as ``{"x": {"type": "string"}}``."""
    keys = parameters.keys() if isinstance(parameters, Mapping) else ()
    bare = keys and not {"properties", "additionalProperties", "$defs", "not", "if"} & set(keys)
    bare = bare and all(isinstance(value, Mapping) for value in parameters.values())
    return {"type": "object", "properties": parameters} if bare else parameters


def _parse(value: Any) -> Any:
    """Return the value of a text in JSON or, as pandas writes it, in Python; a list of a text that is neither."""
    if not isinstance(value, str):
        return value
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return read(value.strip())
    return [value]


def _chat_or_text(content: Any, name: str) -> Any:
    """Return the messages of a text that is a list of them, as in a CSV file; another prompt as it is.

    Raises:
        ValueError: If the text begins as such a list, and cannot be read.
    """
    if not isinstance(content, str) or not LISTED.match(content):
        return content
    messages = _parse(content)
    if messages == [content] and BEGUN.match(content):
        raise ValueError(
            f"expected a text, or a chat as JSON, got {content!r:.80}, which begins as a chat and is no JSON, in "
            f"{name}: write the column by json.dumps, or pass preprocess= to read it"
        )
    keys = [message.keys() if isinstance(message, Mapping) else () for message in messages]
    return (
        messages if all({"role", "content"} <= {*names} or {"from", "value"} <= {*names} for names in keys) else content
    )


def read_messages(content: Any, name: str, *, continues: bool = False) -> list[dict[str, Any]]:
    """Return validated chat messages without entries that are None at any depth, which tables add for missing keys.

    The order of roles is left to the chat template, but an answer at the end raises unless the policy ``continues`` it.

    Raises:
        ValueError: If a message is malformed; with the row and the message.
    """
    is_list = isinstance(content, Sequence) and not isinstance(content, str | bytes | bytearray)
    if not is_list or not any(isinstance(message, Mapping) for message in content):
        raise ValueError(
            f"expected a string, a list of token ids, or a list of chat messages, got {_description(content)} in {name}"
        )
    messages = [_message(message, number, name) for number, message in enumerate(content)]
    if messages[-1]["role"] == "assistant" and not continues:
        raise ValueError(
            f"expected chat messages that end before the assistant's answer, got its answer as the last one in {name}: "
            'leave it out, as preprocess=lambda row: row | {"messages": row["messages"][:-1]}, or pass '
            'chat_template_kwargs={"continue_final_message": True} if the policy goes on with it'
        )
    return messages


def _message(message: Any, number: int, name: str) -> dict[str, Any]:
    where = f"message {number} of {name}"
    example = '{"role": "user", "content": "..."}'
    if not isinstance(message, Mapping):
        raise ValueError(f"expected {where} to be a mapping such as {example}, got {_description(message)}")
    if not isinstance(message.get("role"), str):
        raise ValueError(f'expected {where} to have a string "role", as {example}, got {dict(message)!r:.200}')
    kept = without_none(dict(message))
    if (text := joined_parts(kept.get("content"))) is not None:
        return {**kept, "content": text}
    if has_pictures(message.get("content")):
        return {**kept, "content": list(message["content"])}
    if "content" not in kept and "tool_calls" in kept:
        return kept
    raise ValueError(
        f'expected {where} to have a string "content", as {example}, got {dict(message)!r:.200}: '
        + content_cure(message.get("content"))
    )


def content_cure(content: Any) -> str:
    """Return the cure of a message whose content is no text."""
    if isinstance(content, list | tuple | Mapping):
        return "parts of type text and image are supported; sound and videos are not"
    return "write its text, or leave the message out"


def has_pictures(content: Any) -> bool:
    """Return True for the content of a message that is parts of text and at least one picture."""
    parts = content if isinstance(content, list | tuple) else ()
    kinds = {part.get("type") if isinstance(part, Mapping) else None for part in parts}
    texts = (part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text")
    return bool(kinds & {*PARTS}) and kinds <= {"text", *PARTS} and all(isinstance(text, str) for text in texts)


def joined_parts(content: Any) -> str | None:
    """Return the text of a message's content, which is a string or parts of text alone; None for another content."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) and content else [None]
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else None  # pyrefly: ignore[no-matching-overload]


def _description(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a mapping with {in_words(value)}"
    kinds = sorted({type(item).__name__ for item in value}) if isinstance(value, list | tuple) else []
    return f"a {type(value).__name__}" + (f" of {' and '.join(kinds)}" if kinds else "") + f" ({value!r:.80})"
