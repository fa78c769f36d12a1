"""Messages of Anthropic."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from typing_extensions import override

from lightning_rl.environments.gateway import reading
from lightning_rl.environments.gateway.calls import Call, CallAnswer, Event, WireProtocol
from lightning_rl.utils.arguments import check_choices

COUNT = "/v1/messages/count_tokens"  # of the tokens of a prompt, with the same body
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
SPECIAL = {"assistant": ("thinking", "tool_use"), "user": ("tool_result",), "system": ()}  # blocks by role
DATA = "data:{media_type};base64,{data}"
PARTS: reading.Parts = {
    "text": lambda block: reading.text(block["text"]),
    "image": lambda block: reading.picture(block["source"].get("url") or DATA.format(**block["source"])),
}


class AnthropicMessages(WireProtocol):
    """Protocol of ``POST /v1/messages``; reasoning is a block of thinking, signed with the id of its answer."""

    route = "/v1/messages"
    prefix = "msg_"
    tool = ("custom", "input_schema")
    refused = ("container", "mcp_servers", "output_config.format", "output_format")

    @override
    def _messages(self, fields: dict[str, Any]) -> list[dict[str, Any]]:
        system = reading.content(fields.pop("system", ""), PARTS, "system")
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        messages += [each for message in fields["messages"] for each in _messages(message)]
        if messages and messages[-1]["role"] == "assistant":
            raise ValueError("expected a user's message at the end, got one of the assistant: let the policy begin it")
        return messages

    @override
    def body(self, call: Call, answer: CallAnswer) -> dict[str, Any]:
        body = {"id": f"{self.prefix}{answer.id}", "type": "message", "role": "assistant", "model": answer.model}
        reason = REASONS[answer.finish] if answer.stop is None else "stop_sequence"
        body |= {"content": list(_blocks(answer)), "stop_reason": reason, "stop_sequence": answer.stop}
        return body | {"usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens}}

    @override
    def events(self, call: Call, answer: CallAnswer) -> Iterator[Event]:
        return ((data["type"], data) for data in _events(self.body(call, answer)))

    @override
    def error(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:
        kind = ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


def _messages(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a message as those of a chat template: results of tools precede the rest of a user's message."""
    role, content, blocks = message["role"], message["content"], dict[str, list[Mapping[str, Any]]]()
    check_choices(SPECIAL, role=role)
    for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        blocks.setdefault(block["type"] if block["type"] in SPECIAL[role] else "", []).append(block)
    rest = reading.content(blocks.get(""), PARTS, role)
    if role == "assistant":
        calls = [reading.tool_call(each["name"], each["input"], each["id"]) for each in blocks.get("tool_use", ())]
        reasoning = "".join(each["thinking"] for each in blocks["thinking"]) if "thinking" in blocks else None
        return [reading.assistant(rest, reasoning, calls)]
    results = [(each["tool_use_id"], each.get("content")) for each in blocks.get("tool_result", ())]
    replies = [(reading.text(call_id), reading.content(value, PARTS, "tool")) for call_id, value in results]
    messages = [{"role": "tool", "tool_call_id": call_id, "content": value} for call_id, value in replies]
    return messages + ([{"role": role, "content": rest}] if "" in blocks or not messages else [])


def _blocks(answer: CallAnswer) -> Iterator[dict[str, Any]]:
    if answer.reasoning is not None:
        yield {"type": "thinking", "thinking": answer.reasoning, "signature": answer.id}
    if answer.text or not answer.tool_calls:  # programs read the text of an answer without calls
        yield {"type": "text", "text": answer.text}
    for call in answer.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}


def _events(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": {**body["usage"], "output_tokens": 0}}
    yield {"type": "message_start", "message": {**body, **begun}}
    for index, block in enumerate(body["content"]):
        at = {"index": index}
        names = [name for name in ("thinking", "signature", "text") if name in block]
        deltas = [{"type": f"{name}_delta", name: block[name]} for name in names]
        if block["type"] == "tool_use":
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        empty = dict.fromkeys(names, "") if names else {"input": {}}
        yield {"type": "content_block_start", **at, "content_block": {**block, **empty}}
        yield from ({"type": "content_block_delta", **at, "delta": delta} for delta in deltas)
        yield {"type": "content_block_stop", **at}
    delta = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": body["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}
