"""Parts of requests that several protocols have, as parts of chat messages."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from lightning_rl.data.pictures import DATA_URL
from lightning_rl.samples import Message
from lightning_rl.utils.arguments import check_choices, check_unicode
from lightning_rl.utils.strict_json import parse_json

ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
Parts = Mapping[str, Callable[[Mapping[str, Any]], Any]]  # reader of each type of part: text, or a picture


def text(value: Any) -> str:
    """Return a value that has to be text."""
    if not isinstance(value, str):
        raise ValueError(f"expected text, got {value!r:.200}: send a string")
    check_unicode(value, "a call")
    return value


def message(fields: Mapping[str, Any], parts: Parts) -> dict[str, Any]:
    """Return role and content of a message of OpenAI."""
    check_choices(ROLES, role=fields["role"])
    role = ROLES[fields["role"]]
    return {"role": role, "content": content(fields.get("content"), parts, role)}


def content(value: Any, parts: Parts, role: str) -> Any:
    """Return a content as text, or as parts if one is a picture; texts of others than an assistant become lines."""
    if value is None or isinstance(value, str):
        return value or ""
    pieces: list[Any] = []
    for part in value:
        check_choices(parts, **{"a part of type": part["type"]})
        pieces.append(parts[part["type"]](part))
    if all(isinstance(piece, str) for piece in pieces):
        return ("" if role == "assistant" else "\n").join(pieces)
    return [{"type": "text", "text": piece} if isinstance(piece, str) else piece for piece in pieces]


def picture(address: Any) -> Message:
    """Return a part with a picture, which the request has to contain."""
    if not isinstance(address, str) or not DATA_URL.match(address):
        wanted = "a picture as data URL (data:image/png;base64,...)"
        raise ValueError(f"expected {wanted}, got {address!r:.80}: send the bytes, as the run downloads nothing")
    return {"type": "image", "image": address}


def schema(tool: Mapping[str, Any], kind: str, parameters: str) -> Message:
    """Return the schema of a tool of a type for a chat template; ``parameters`` names the field of their schema."""
    check_choices([kind], **{"a tool of type": tool.get("type", kind)})
    function = tool.get("function", tool)
    described = {"description": function["description"]} if function.get("description") else {}
    properties = function.get(parameters) or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": text(function["name"]), **described, "parameters": properties}}


def tool_call(name: Any, arguments: Any, call_id: Any) -> Message:
    """Return a tool call of a message; arguments that are no JSON object remain text."""
    if isinstance(arguments, str):
        with suppress(ValueError):
            value = parse_json(arguments or "{}")
            arguments = value if isinstance(value, dict) else arguments
    elif not isinstance(arguments, Mapping):
        raise ValueError(f"expected an object of arguments, got {arguments!r:.200}: send a JSON object")
    return {"type": "function", "id": text(call_id), "function": {"name": text(name), "arguments": arguments}}


def assistant(value: Any, reasoning: str | None, calls: Sequence[Message]) -> dict[str, Any]:
    """Return a message of the policy."""
    reasoned = {} if reasoning is None else {"reasoning_content": reasoning}
    return {"role": "assistant", "content": value, **reasoned, **({"tool_calls": list(calls)} if calls else {})}
