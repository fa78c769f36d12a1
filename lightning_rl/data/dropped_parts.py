"""Parts of a conversation that a chat template leaves out without an error."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Any]], str]
"""Function from messages and schemas of tools to the text that a chat template writes."""


def dropped_parts(
    render: Render, messages: Sequence[Message], tools: Sequence[Any] = (), *, before: Sequence[Message] = ()
) -> list[str]:
    """Return the texts, tool calls and tools that a chat template does not write; empty if it writes all of them.

    Unique words replace the texts and the names of tools, since a template may trim, escape or capitalize a real text.
    A template that shortens texts is not found. Reasoning, the text beside tool calls and the ``name`` of a message are
    not compared: many templates drop them by design. A conversation that the template refuses has no dropped parts.

    Args:
        render: Function that renders with the chat template.
        messages: Messages of the conversation.
        tools: Schemas of its tools.
        before: Earlier messages of it, which are not compared.
    """
    marked, marks = mark_messages(messages)
    words = [f"tool-{place}-" for place in range(len(tools))]
    marks |= {word: f"the tool {_function(tool).get('name')}" for word, tool in zip(words, tools, strict=True)}
    try:
        text = render(
            [*before, *marked], [_rename(tool, word) for tool, word in zip(tools, words, strict=True)]
        ).lower()
    except Exception:  # noqa: BLE001  a template may raise anything
        return []
    return list(dict.fromkeys(part for word, part in marks.items() if word not in text))


def moved_parts(render: Render, messages: Sequence[Message]) -> list[str]:
    """Return the texts that a chat template writes before an answer that they follow, as a late system message.

    Args:
        render: Function that renders with the chat template.
        messages: Messages of the conversation.
    """
    marked, marks = mark_messages(messages)
    try:
        text = render(marked, ()).lower()
    except Exception:  # noqa: BLE001  a template may raise anything
        return []
    moved, answer = list[str](), -1
    for word, part in marks.items():
        place = text.find(word)
        if part.endswith("the role assistant"):
            answer = max(answer, place)
        elif 0 <= place < answer:
            moved.append(part)
    return list(dict.fromkeys(moved))


def mark_messages(messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
    """Return the messages with unique words as texts and names of called tools, and the part that each word marks."""
    marked, marks = list[Message](), dict[str, str]()
    for number, message in enumerate(messages):
        role, calls = message.get("role"), message.get("tool_calls") or ()
        words = [f"call-{place}-of-message-{number}-" for place in range(len(calls))]
        if calls:
            message = {**message, "tool_calls": [_rename(*pair) for pair in zip(calls, words, strict=True)]}
            marks |= dict.fromkeys(words, f"a tool call of the role {role}")
        elif str(message.get("content") or "").strip():
            message = {**message, "content": (word := f"text-of-message-{number}-")}
            marks[word] = f"the text of the role {role}"
        marked.append(message)
    return marked, marks


def _function(tool: Any) -> Mapping[str, Any]:
    """Return the function of a tool's schema or of a call, which may be nested."""
    tool = tool if isinstance(tool, Mapping) else {}
    return tool["function"] if isinstance(tool.get("function"), Mapping) else tool


def _rename(tool: Any, name: str) -> Any:
    """Return a tool's schema or a call with another name."""
    function = {**_function(tool), "name": name}
    return {**tool, "function": function} if isinstance(tool, Mapping) and "function" in tool else function
