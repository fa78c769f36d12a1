"""Call of a program, the answer to it, and the base of the protocols, which translate both by pure functions."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Literal

from lightning_rl.environments.chat_template import with_callers
from lightning_rl.environments.environment import ToolCall
from lightning_rl.environments.gateway import reading
from lightning_rl.samples import POLICY, Message
from lightning_rl.utils.arguments import check_counts

MODELS = "/v1/models"
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")  # the first one with a value counts
STOPS = ("stop", "stop_sequences")
SERVED = {*LIMITS, *STOPS, "messages", "model", "stream", "stream_options", "tools", "tool_choice"}

Event = tuple[str | None, Mapping[str, Any] | str]  # name and data of a server-sent event


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Request of a program as chat messages: messages ({"role": "user", "content": "2 + 3?"},), max_tokens 64.

    Args:
        model: Name of the model, which is the role of the policy in the call.
        messages: Messages for a chat template, of the roles system, user, assistant and tool. A content is text, or a
            list of parts if one is a picture, which is a data URL. Arguments of tool calls are mappings, or text that
            is no JSON object.
        tools: Schemas of functions for a chat template.
        max_tokens: Maximum number of tokens of the answer.
        stop: Texts that end the answer.
        stream: True for an answer as server-sent events.
        stream_usage: True if chat completions end with an event of the numbers of tokens.
        ignored: Names of fields without effect, such as ``temperature``, which the run decides.
    """

    model: str = POLICY
    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = False
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAnswer:
    """Answer of the policy: text "5", reasoning None, tool_calls (), finish "stop", id "a1", stop "#" after it.

    Tool calls have ids, which differ within a conversation. Each protocol adds its prefix to the id of the answer.
    """

    text: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    completion_tokens: int
    model: str
    id: str
    stop: str | None = None


class WireProtocol(ABC):
    """Form of calls and answers in an HTTP API; the time of an answer is 0.

    What a program sends back of ``body`` or of ``events`` is read as the message of the answer.

    Attributes:
        route: Path of requests with POST.
        prefix: Beginning of the ids of responses, before :attr:`CallAnswer.id`.
        tool: Type of tools, and field with the schema of their parameters.
        refused: Names of fields that are refused with a value; a dot separates the names of nested fields.
        defaults: Values of fields that are refused with any other value.
    """

    route: ClassVar[str]
    prefix: ClassVar[str]
    tool: ClassVar[tuple[str, str]] = ("function", "parameters")
    refused: ClassVar[tuple[str, ...]]
    defaults: ClassVar[Mapping[str, Any]] = {}

    def read(self, body: Mapping[str, Any]) -> Call:
        """Return the call of a request, whose body is parsed from JSON.

        Raises:
            ValueError: If the body is malformed or requests what cannot be served.
        """
        try:
            return self._read({name: value for name, value in body.items() if value is not None})
        except (KeyError, TypeError, AttributeError) as error:
            kind = type(error).__name__
            raise ValueError(f"expected fields as {self.route} has them, got {kind}: {error}: correct them") from error

    def _read(self, fields: dict[str, Any]) -> Call:
        for path, default in {**dict.fromkeys(self.refused), **self.defaults}.items():
            value = reduce(lambda inner, name: (inner or {}).get(name), path.split("."), fields)
            if value and value != default:
                wanted = f"{path} to be {json.dumps(default)}"
                raise ValueError(f"expected {wanted}, got {value!r:.200}: leave it out, as the policy cannot serve it")
        choice = fields.get("tool_choice", "auto")
        kind = choice["type"] if isinstance(choice, Mapping) else choice
        if kind not in ("auto", "none"):
            raise ValueError(f"expected tool_choice auto or none, got {choice!r:.200}: let the policy choose its calls")
        limit, stop = (next((fields[name] for name in names if name in fields), None) for names in (LIMITS, STOPS))
        check_counts(1, optional=True, max_tokens=limit)
        if not (messages := with_callers(self._messages(fields))):
            raise ValueError("expected messages, got none: send what the policy has to answer")
        return Call(
            model=reading.text(fields.get("model", POLICY)),
            messages=tuple(messages),
            tools=() if kind == "none" else tuple(reading.schema(tool, *self.tool) for tool in fields.get("tools", ())),
            max_tokens=limit,
            stop=tuple(reading.text(each) for each in ([stop] if isinstance(stop, str) else stop or ())),
            stream=bool(fields.get("stream")),
            stream_usage=bool(fields.get("stream_options", {}).get("include_usage")),
            ignored=tuple(sorted(set(fields) - SERVED - {*self.refused, *self.defaults})),
        )

    @abstractmethod
    def _messages(self, fields: dict[str, Any]) -> list[dict[str, Any]]:
        """Take the messages out of the fields of a body."""

    @abstractmethod
    def body(self, call: Call, answer: CallAnswer) -> dict[str, Any]:
        """Return the body of the response with an answer."""

    @abstractmethod
    def events(self, call: Call, answer: CallAnswer) -> Iterator[Event]:
        """Yield the server-sent events with an answer, in the order of the API."""

    def error(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:
        """Return the body of the response with an error, and its code if the API has one."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def models(*names: str) -> dict[str, Any]:
    """Return the list of models, with the fields of both providers."""
    fields = {"object": "model", "created": 0, "owned_by": "lightning-rl", "type": "model"}
    data = [{"id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z", **fields} for name in names]
    return {"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def key_of(headers: Mapping[str, str]) -> str:
    """Return the key of a request, from ``x-api-key`` or a bearer token; empty without one. Names ignore case."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    return headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")


def encode_event(event: Event) -> bytes:
    """Return the bytes of a server-sent event, in ASCII, so that no character of a text ends a line."""
    name, data = event
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
