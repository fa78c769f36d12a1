"""Bodies of requests as calls, and the order of events, in each protocol."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.protocol_server import PROTOCOLS

from lightning_rl.environments import ToolCall
from lightning_rl.environments.gateway import AnthropicMessages, Call, CallAnswer, ChatCompletions, Responses
from lightning_rl.environments.gateway.calls import WireProtocol, encode_event, key_of

CHAT, RESPONSES, ANTHROPIC = PROTOCOLS
PIXEL = "iVBORw0KGgo="
URL = f"data:image/png;base64,{PIXEL}"
PICTURE = {"type": "image", "image": URL}
ASK = {"role": "user", "content": "?"}
CALLS = [{"type": "function", "id": "c1", "function": {"name": "look", "arguments": {"at": "é"}}}]
SEEN = {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "a\nb"}
TWO = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
HISTORY = (
    {"role": "system", "content": "a\nb"},
    {"role": "user", "content": [{"type": "text", "text": "?"}, PICTURE]},
    {"role": "assistant", "content": "I look", "reasoning_content": "hm", "tool_calls": CALLS},
    SEEN,
    {"role": "user", "content": "and?"},
)


def test_chat_completions_read_a_history() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}}
    picture = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    said: dict[str, Any] = {"role": "assistant", "content": [{"type": "text", "text": each} for each in ("I ", "look")]}
    messages = [
        {"role": "developer", "content": TWO},
        {"role": "user", "content": [{"type": "text", "text": "?"}, picture]},
        {**said, "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": TWO},
        {"role": "user", "content": "and?"},
    ]
    assert CHAT.read({"model": "m", "messages": messages}).messages == HISTORY


def test_responses_read_a_history() -> None:
    one, two = ({"type": "input_text", "text": each} for each in "ab")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": URL}]},
        {"type": "reasoning", "id": "r1", "summary": [], "encrypted_content": "hm"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "é"}'},
        {"type": "function_call_output", "call_id": "c1", "output": [one, two]},
        {"role": "user", "content": "and?"},
    ]
    assert RESPONSES.read({"model": "m", "instructions": "a\nb", "input": items}).messages == HISTORY


def test_items_of_two_answers_are_two_messages() -> None:
    text = {"role": "assistant", "content": "a"}
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "é"}'}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    messages = RESPONSES.read({"input": [text, call, thought, text]}).messages
    assert messages == ({**text, "tool_calls": CALLS}, {**text, "reasoning_content": "hm"})


def test_anthropic_messages_read_a_history() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "é"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": TWO, "is_error": False}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image", "source": source}]},
        {
            "role": "assistant",
            "content": [thought, {"type": "text", "text": "I "}, {"type": "text", "text": "look"}, use],
        },
        {"role": "user", "content": [{"type": "text", "text": "and?"}, result]},
    ]
    assert ANTHROPIC.read({"model": "m", "max_tokens": 8, "system": TWO, "messages": messages}).messages == HISTORY


def test_a_users_message_of_results_alone_is_messages_of_tools_alone() -> None:
    results: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": f"c{i}", "content": str(i)} for i in range(2)
    ]
    results[1] |= {"content": [{"type": "image", "source": {"type": "url", "url": URL}}], "is_error": True}
    read = ANTHROPIC.read({"messages": [{"role": "user", "content": results}]}).messages
    assert [(each["role"], each["tool_call_id"], each["content"]) for each in read] == [
        ("tool", "c0", "0"),
        ("tool", "c1", [PICTURE]),
    ]


@pytest.mark.parametrize(
    ("text", "arguments"), [("{broken", "{broken"), ("[1]", "[1]"), ("", {}), ('{"x": 1}', {"x": 1})]
)
def test_arguments_that_are_no_object_remain_text(text: str, arguments: Any) -> None:
    said = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": text}}],
    }
    (message,) = CHAT.read({"messages": [said]}).messages
    assert message["content"] == "" and message["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("choice", ["none", {"type": "none"}])
def test_without_calls_the_policy_sees_no_tools(choice: Any) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert CHAT.read({"messages": [ASK], "tools": [tool], "tool_choice": choice}).tools == ()
    assert CHAT.read({"messages": [ASK], "tools": [tool], "tool_choice": "auto"}).tools[0]["function"] == {
        "name": "f",
        "parameters": {"type": "object", "properties": {}},
    }


def test_fields_with_their_defaults_are_served_and_sampling_is_ignored_by_name() -> None:
    fixed: dict[str, Any] = {"n": 1, "logprobs": False, "response_format": {"type": "text"}, "stop": ["a", "b"]}
    call = CHAT.read({"messages": [ASK], **fixed, "seed": 1, "top_p": None, "temperature": 0, "stream": True})
    assert call == Call(messages=(ASK,), stop=("a", "b"), stream=True, ignored=("seed", "temperature"))
    fixed = {"include": ["reasoning.encrypted_content"], "text": {"format": {"type": "text"}, "verbosity": "low"}}
    assert RESPONSES.read({"input": "?", **fixed, "store": False}).ignored == ("store", "text")
    assert RESPONSES.read({"input": "?", "include": [], "tools": None}) == Call(messages=(ASK,))


REFUSED: list[tuple[WireProtocol, dict[str, Any], str]] = [
    (CHAT, {"logprobs": True}, "expected logprobs to be null, got True: leave it out"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "a tool of type function"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"stop": [1]}, "expected text"),
    (CHAT, {"messages": []}, "got none"),
    (CHAT, {"messages": "?"}, "got AttributeError|got TypeError"),
    (CHAT, {"messages": [{"role": "root", "content": "?"}]}, "role"),
    (CHAT, {"messages": [{"role": "tool", "content": "?"}]}, "KeyError: 'tool_call_id'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "'input_audio'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "'file'"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}]},
        "data URL",
    ),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"conversation": "c"}, "conversation"),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format"),
    (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "'web_search'"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "i"}]}, "'item_reference'"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "data URL"),
    (ANTHROPIC, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    (ANTHROPIC, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    (ANTHROPIC, {"mcp_servers": [{"url": "u"}]}, "mcp_servers"),
    (ANTHROPIC, {"messages": [ASK, {"role": "assistant", "content": "It is"}]}, "let the policy begin it"),
    (ANTHROPIC, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
]


@pytest.mark.parametrize(("protocol", "fields", "message"), REFUSED)
def test_a_request_that_cannot_be_served_is_refused_by_name(
    protocol: WireProtocol, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        protocol.read({"messages": [ASK], **({"input": "?"} if protocol is RESPONSES else {}), **fields})


def refusal(protocol: WireProtocol, body: Any) -> str:
    """The error of a body; empty without."""
    try:
        return "" if protocol.read(body).messages else "no message"
    except ValueError as error:
        return str(error)


kinds = ["text", "input_text", "image_url", "image", "tool_use", "tool_result", "thinking", "reasoning", "function"]
words = st.sampled_from(
    [*kinds, "message", "function_call", "function_call_output", "user", "assistant", "tool", "none"]
)
names = [
    "type",
    "role",
    "content",
    "text",
    "name",
    "id",
    "tool_calls",
    "function",
    "arguments",
    "input",
    "source",
    "url",
]
keys = st.sampled_from(
    [*names, "call_id", "output", "tool_call_id", "tool_use_id", "thinking", "image_url", "encrypted_content"]
)
junk = st.recursive(
    st.none() | st.integers() | words,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(keys, each, max_size=6),
    max_leaves=20,
)
fields = st.sampled_from(
    ["messages", "input", "tools", "tool_choice", "stop", "system", "instructions", "text", "stream_options"]
)


@settings(max_examples=200)
@given(st.sampled_from(PROTOCOLS), junk | st.dictionaries(fields, junk | st.lists(junk, max_size=3), max_size=6))
def test_any_body_is_a_call_or_a_named_error(protocol: WireProtocol, body: Any) -> None:
    assert refusal(protocol, body).partition(" ")[0] in ("", "expected")


ANSWER = CallAnswer(
    text="I look",
    reasoning="hm",
    tool_calls=(ToolCall(name="look", arguments={"at": "é"}, id="c1"),),
    finish="tool_calls",
    prompt_tokens=3,
    completion_tokens=2,
    model="m",
    id="1",
)
PART = "content_part.added {0}.delta {0}.done content_part.done output_item.done"


def test_events_have_the_order_of_each_protocol() -> None:
    call = Call(messages=(ASK,), stream_usage=True)
    *chunks, (_, done) = ChatCompletions().events(call, ANSWER)
    deltas = [next(iter(data["choices"]), {}).get("delta") for _, data in chunks if isinstance(data, dict)]
    assert [list(delta or ()) for delta in deltas] == [
        ["role"], ["reasoning_content"], ["content"], ["tool_calls"], [], []
    ]  # fmt: skip
    assert done == "[DONE]" and isinstance(chunks[-1][1], dict) and chunks[-1][1]["usage"]["total_tokens"] == 5
    names = [str(name).removeprefix("response.") for name, _ in Responses().events(call, ANSWER)]
    items = f"output_item.added {PART.format('reasoning_text')} output_item.added {PART.format('output_text')}"
    asked = "output_item.added function_call_arguments.delta function_call_arguments.done output_item.done"
    assert " ".join(names) == f"created in_progress {items} {asked} completed"
    numbers = [data["sequence_number"] for _, data in Responses().events(call, ANSWER) if isinstance(data, dict)]
    assert numbers == list(range(len(names)))
    start, delta, stop = (f"content_block_{kind}" for kind in ("start", "delta", "stop"))
    blocks = [start, delta, delta, stop, start, delta, stop, start, delta, stop]
    names = [str(name) for name, _ in AnthropicMessages().events(call, ANSWER)]
    assert names == ["message_start", *blocks, "message_delta", "message_stop"]


def test_an_event_is_one_line_of_ascii() -> None:
    assert encode_event(("a", {"text": "\u2028é"})) == b'event: a\ndata: {"text": "\\u2028\\u00e9"}\n\n'
    assert encode_event((None, "[DONE]")) == b"data: [DONE]\n\n"


def test_a_key_comes_in_either_header() -> None:
    keys = [key_of({"Authorization": "bearer  k"}), key_of({"x-api-key": "k"})]
    assert keys == ["k", "k"] and key_of({"Authorization": "Basic k"}) == key_of({}) == ""


def test_errors_have_the_type_of_their_status() -> None:
    kinds = [ANTHROPIC.error(status, "m")["error"]["type"] for status in (400, 401, 404, 500)]
    assert kinds == ["invalid_request_error", "authentication_error", "not_found_error", "api_error"]
    assert [CHAT.error(status, "m")["error"]["type"] for status in (400, 500)] == [
        "invalid_request_error",
        "server_error",
    ]


def test_an_error_has_its_code_where_the_clients_of_openai_read_it() -> None:
    codes = [protocol.error(400, "m", "context_length_exceeded")["error"].get("code") for protocol in PROTOCOLS]
    assert codes == ["context_length_exceeded", "context_length_exceeded", None]
