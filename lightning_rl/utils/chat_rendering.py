"""Rendering of chats: arguments of tool calls as mappings, also where the data have them as JSON text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

MARK = "mark-of-a-text-51c2"
_TAKES_PARTS: dict[str, bool] = {}  # by the chat template


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
    """Return what the chat template of a tokenizer writes, as ``apply_chat_template`` does.

    Arguments of tool calls that are JSON text, as in OpenAI's form, are passed as mappings, since most templates write
    them as JSON, which would quote the text again. A template that needs the text gets it: one that raises on mappings
    or writes them as Python does.

    Args:
        tokenizer: Tokenizer with a chat template.
        messages: Messages of the chat.
        options: Arguments of ``apply_chat_template``.
    """
    if takes_parts(tokenizer):
        messages = [_with_parts(message) for message in messages]
    parsed = [_with_mappings(message) for message in messages]
    if parsed != list(messages) and _takes_mappings(tokenizer, parsed, options):
        messages = parsed
    return tokenizer.apply_chat_template(list(messages), **options)  # pyrefly: ignore[bad-argument-type]


def takes_parts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the chat template writes the text of a message only as a part, as of some models with towers."""
    template = str(tokenizer.chat_template)
    if template not in _TAKES_PARTS:
        contents = MARK, [{"type": "text", "text": MARK}]
        written = [_writes_mark(tokenizer, {"role": "user", "content": content}) for content in contents]
        _TAKES_PARTS[template] = written == [False, True]
    return _TAKES_PARTS[template]


def _writes_mark(tokenizer: PreTrainedTokenizerBase, message: Mapping[str, Any]) -> bool:
    try:
        return MARK in str(tokenizer.apply_chat_template([dict(message)], tokenize=False))
    except Exception:  # noqa: BLE001  a template may raise anything
        return False


def _with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _takes_mappings(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> bool:
    options = {key: value for key, value in options.items() if key != "sanitize_control_tokens"}  # of token ids alone
    try:
        text = str(tokenizer.apply_chat_template(list(messages), **{**options, "tokenize": False}))  # pyrefly: ignore
    except Exception:  # noqa: BLE001  a template may raise anything
        return False
    written = [_function(call).get("arguments") for message in messages for call in _calls(message)]
    return not any(isinstance(value, Mapping) and value and str(value) in text for value in written)


def _calls(message: Mapping[str, Any]) -> Sequence[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list | tuple) else ()


def _function(call: Any) -> Mapping[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    return function if isinstance(function, Mapping) else {}


def _with_mappings(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose calls have mappings as arguments, where these are JSON text of an object."""
    calls = list[Any]()
    for call in _calls(message):
        function = _function(call)
        try:
            value = json.loads(str(function["arguments"])) if isinstance(function.get("arguments"), str) else None
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            function = {**function, "arguments": value}
            call = {**call, "function": function} if "function" in call else function
        calls.append(call)
    return {**message, "tool_calls": calls} if calls else message
