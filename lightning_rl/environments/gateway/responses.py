"""Responses of OpenAI."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from typing_extensions import override

from lightning_rl.environments.gateway import reading
from lightning_rl.environments.gateway.calls import Call, CallAnswer, Event, WireProtocol
from lightning_rl.utils.arguments import check_choices

ITEMS = ("message", "function_call", "function_call_output", "reasoning")
ORDER = ("reasoning_content", "content", "tool_calls")  # of the items of one answer
PARTS: reading.Parts = {
    "input_text": lambda part: reading.text(part["text"]),
    "output_text": lambda part: reading.text(part["text"]),
    "input_image": lambda part: reading.picture(part.get("image_url")),
}


class Responses(WireProtocol):
    """Protocol of ``POST /v1/responses``, without state: every request has the whole conversation.

    Items of an answer are reasoning, text and calls, in this order; an item of an earlier kind begins the next answer.
    The reasoning is also in ``encrypted_content``, as some programs send back this field alone.
    """

    route = "/v1/responses"
    prefix = "resp_"
    refused = ("background", "previous_response_id", "conversation", "prompt", "top_logprobs")
    defaults: ClassVar[Mapping[str, Any]] = {
        "text.format": {"type": "text"},
        "include": ["reasoning.encrypted_content"],
    }

    @override
    def _messages(self, fields: dict[str, Any]) -> list[dict[str, Any]]:
        system, items = fields.pop("instructions", ""), fields.pop("input", ())
        messages: list[dict[str, Any]] = [{"role": "system", "content": reading.text(system)}] if system else []
        for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
            message, last = _message(item), messages[-1] if messages else {}
            here, before = (max(map(ORDER.index, {*ORDER} & each.keys()), default=0) for each in (message, last))
            follows = here > before or "tool_calls" in message
            if message["role"] == last.get("role") == "assistant" and follows:
                calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
                last |= {**message, "tool_calls": calls} if calls else message
            else:
                messages.append(message)
        return [{"content": "", **message} for message in messages]

    @override
    def body(self, call: Call, answer: CallAnswer) -> dict[str, Any]:
        status = "incomplete" if answer.finish == "length" else "completed"
        usage = {"input_tokens": answer.prompt_tokens, "input_tokens_details": {"cached_tokens": 0}}
        usage |= {"output_tokens": answer.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0}}
        usage["total_tokens"] = answer.prompt_tokens + answer.completion_tokens
        body: dict[str, Any] = {"id": f"{self.prefix}{answer.id}", "object": "response", "created_at": 0}
        body |= {"tools": [{"type": "function", "strict": False, **tool["function"]} for tool in call.tools]}
        body |= {"tool_choice": "auto", "parallel_tool_calls": True, "error": None, "status": status, "usage": usage}
        body["incomplete_details"] = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {**body, "model": answer.model, "output": [{**item, "status": status} for item in _items(answer)]}

    @override
    def events(self, call: Call, answer: CallAnswer) -> Iterator[Event]:
        for number, (kind, data) in enumerate(_events(self.body(call, answer))):
            yield f"response.{kind}", {"type": f"response.{kind}", "sequence_number": number, **data}


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item as a message; one of an answer has the field of its kind alone."""
    kind = item.get("type", "message")
    check_choices(ITEMS, **{"an item of type": kind})
    if kind == "message":
        return reading.message(item, PARTS)
    if kind == "function_call":
        call = reading.tool_call(item["name"], item["arguments"], item["call_id"])
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        output = reading.content(item["output"], PARTS, "tool")
        return {"role": "tool", "tool_call_id": reading.text(item["call_id"]), "content": output}
    texts = [part["text"] for part in item.get("content") or ()] or [item.get("encrypted_content") or ""]
    return {"role": "assistant", "reasoning_content": "".join(texts)}


def _items(answer: CallAnswer) -> Iterator[dict[str, Any]]:
    if answer.reasoning is not None:
        content = [{"type": "reasoning_text", "text": answer.reasoning}]
        item = {"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": content}
        yield {**item, "encrypted_content": answer.reasoning}
    if answer.text or not answer.tool_calls:  # programs read the text of an answer without calls
        content = [{"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}]
        yield {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": content}
    for call in answer.tool_calls:
        item = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "name": call.name}
        yield {**item, "arguments": json.dumps(call.arguments)}


def _events(body: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = {**body, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield "created", {"response": begun}
    yield "in_progress", {"response": begun}
    for number, item in enumerate(body["output"]):
        at = {"output_index": number}
        place = {**at, "item_id": item["id"]}
        empty = {"arguments": ""} if "arguments" in item else {"content": []}
        yield "output_item.added", {**at, "item": {**item, **empty, "status": "in_progress"}}
        if "arguments" in item:
            yield "function_call_arguments.delta", {**place, "delta": item["arguments"]}
            yield "function_call_arguments.done", {**place, "name": item["name"], "arguments": item["arguments"]}
        for index, part in enumerate(item.get("content", ())):
            place |= {"content_index": index, **({"logprobs": []} if "logprobs" in part else {})}
            yield "content_part.added", {**place, "part": {**part, "text": ""}}
            yield f"{part['type']}.delta", {**place, "delta": part["text"]}
            yield f"{part['type']}.done", {**place, "text": part["text"]}
            yield "content_part.done", {**place, "part": part}
        yield "output_item.done", {**at, "item": item}
    yield body["status"], {"response": body}
