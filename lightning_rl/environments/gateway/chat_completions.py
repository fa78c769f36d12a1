"""Chat completions of OpenAI."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from typing_extensions import override

from lightning_rl.environments.gateway import reading
from lightning_rl.environments.gateway.calls import Call, CallAnswer, Event, WireProtocol

PARTS: reading.Parts = {
    "text": lambda part: reading.text(part["text"]),
    "image_url": lambda part: reading.picture(part["image_url"]["url"]),
}


class ChatCompletions(WireProtocol):
    """Protocol of ``POST /v1/chat/completions``; reasoning is the field ``reasoning_content`` of a message."""

    route = "/v1/chat/completions"
    prefix = "chatcmpl-"
    refused = ("logprobs", "top_logprobs", "audio", "functions", "web_search_options")
    defaults: ClassVar[Mapping[str, Any]] = {"n": 1, "modalities": ["text"], "response_format": {"type": "text"}}

    @override
    def _messages(self, fields: dict[str, Any]) -> list[dict[str, Any]]:
        return [_message(message) for message in fields["messages"]]

    @override
    def body(self, call: Call, answer: CallAnswer) -> dict[str, Any]:
        functions = [
            ({"name": each.name, "arguments": json.dumps(each.arguments)}, each.id) for each in answer.tool_calls
        ]
        calls = [{"type": "function", "id": call_id, "function": function} for function, call_id in functions]
        message = reading.assistant(answer.text or (None if calls else ""), answer.reasoning, calls) | {"refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish}
        usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
        usage["total_tokens"] = answer.prompt_tokens + answer.completion_tokens
        head = {"id": f"{self.prefix}{answer.id}", "object": "chat.completion", "created": 0, "model": answer.model}
        return {**head, "choices": [choice], "usage": usage}

    @override
    def events(self, call: Call, answer: CallAnswer) -> Iterator[Event]:
        head = self.body(call, answer) | {"object": "chat.completion.chunk"}
        message, usage = head["choices"][0]["message"], head.pop("usage")
        head |= {"usage": None} if call.stream_usage else {}
        deltas = [{name: message[name]} for name in ("role", "reasoning_content", "content") if name in message]
        deltas += [{"tool_calls": [{"index": i, **each}]} for i, each in enumerate(message.get("tool_calls", ()))]
        for delta in (*deltas, {}):
            finish = None if delta else answer.finish
            yield None, {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]}
        if call.stream_usage:
            yield None, {**head, "choices": [], "usage": usage}
        yield None, "[DONE]"


def _message(fields: Mapping[str, Any]) -> dict[str, Any]:
    message = reading.message(fields, PARTS)
    if message["role"] == "assistant":
        functions = [(each["function"], each["id"]) for each in fields.get("tool_calls") or ()]
        calls = [reading.tool_call(each["name"], each["arguments"], call_id) for each, call_id in functions]
        thoughts = [fields[name] for name in ("reasoning_content", "reasoning") if fields.get(name) is not None]
        message = reading.assistant(message["content"], reading.text(thoughts[0]) if thoughts else None, calls)
    elif message["role"] == "tool":
        message["tool_call_id"] = reading.text(fields["tool_call_id"])
    return message if fields.get("name") is None else {**message, "name": reading.text(fields["name"])}
