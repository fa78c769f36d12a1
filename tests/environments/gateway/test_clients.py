"""The official clients of OpenAI and Anthropic, against the protocols."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic, AsyncAnthropic
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.protocol_server import KEY, MODEL, TOKENS, ProtocolServer, protocol_server
from openai import AsyncOpenAI, OpenAI

from lightning_rl.environments import Action, ToolCall
from lightning_rl.environments.messages import message_of

QUESTION: Any = {"role": "user", "content": "2 + 3?"}
FUNCTION: Any = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"x": {}}}}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
leaves = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | texts
)
values = st.recursive(
    leaves, lambda each: st.lists(each, max_size=3) | st.dictionaries(texts, each, max_size=3), max_leaves=6
)
calls = st.lists(
    st.tuples(st.from_regex(r"[a-zA-Z0-9_-]{1,8}", fullmatch=True), st.dictionaries(texts, values, max_size=3)),
    max_size=3,
)


@pytest.fixture(scope="module")
def server() -> Iterator[ProtocolServer]:
    with protocol_server() as server:
        yield server


@pytest.fixture(scope="module")
def gpt(server: ProtocolServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: ProtocolServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client


def chat(gpt: OpenAI, *, stream: bool) -> None:
    """Sends a question, and then the question with the answer and a further one."""
    if stream:
        with gpt.chat.completions.stream(model=MODEL, messages=[QUESTION]) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = gpt.chat.completions.create(model=MODEL, messages=[QUESTION]).choices[0].message
    history: list[Any] = [QUESTION, message, QUESTION]
    gpt.chat.completions.create(model=MODEL, messages=history)


def respond(gpt: OpenAI, *, stream: bool) -> None:
    if stream:
        with gpt.responses.stream(model=MODEL, input=[QUESTION]) as events:
            response = events.get_final_response()
    else:
        response = gpt.responses.create(model=MODEL, input=[QUESTION])
    history: list[Any] = [QUESTION, *response.output, QUESTION]
    gpt.responses.create(model=MODEL, input=history)


def message(claude: Anthropic, *, stream: bool) -> None:
    if stream:
        with claude.messages.stream(model=MODEL, max_tokens=8, messages=[QUESTION]) as events:
            answer = events.get_final_message()
    else:
        answer = claude.messages.create(model=MODEL, max_tokens=8, messages=[QUESTION])
    history: list[Any] = [QUESTION, {"role": "assistant", "content": answer.content}, QUESTION]
    claude.messages.create(model=MODEL, max_tokens=8, messages=history)


ask_by_protocol = pytest.mark.parametrize(("client", "ask"), [("gpt", chat), ("gpt", respond), ("claude", message)])


@pytest.mark.parametrize("stream", [False, True])
@ask_by_protocol
def test_what_a_client_sends_back_reads_as_the_message_that_was_returned(
    server: ProtocolServer, client: str, ask: Callable[..., None], request: pytest.FixtureRequest, stream: bool
) -> None:
    one = request.getfixturevalue(client)

    @settings(max_examples=25)
    @given(texts, st.none() | texts, calls)
    def check(text: str, reasoning: str | None, calls: list[tuple[str, dict[str, Any]]]) -> None:
        made = tuple(ToolCall(name=name, arguments=arguments, id=f"c{i}") for i, (name, arguments) in enumerate(calls))
        server.answer = replace(
            server.answer, text=text, reasoning=reasoning, tool_calls=made, finish="tool_calls" if made else "stop"
        )
        ask(one, stream=stream)
        returned = message_of(Action(text=text, reasoning=reasoning, tool_calls=made))
        assert server.calls[-1].messages == (QUESTION, returned, QUESTION)

    check()


def test_requests_of_the_clients_read_as_calls(server: ProtocolServer, gpt: OpenAI, claude: Anthropic) -> None:
    tools: list[Any] = [{"type": "function", "function": FUNCTION}]
    gpt.chat.completions.create(
        model=MODEL, messages=[QUESTION], tools=tools, max_completion_tokens=9, temperature=0.5, stop="!"
    )
    gpt.responses.create(
        model=MODEL, input="2 + 3?", tools=[{"type": "function", "strict": True, **FUNCTION}], max_output_tokens=9
    )
    claude.messages.create(
        model=MODEL,
        messages=[QUESTION],
        tools=[{"name": "add", "description": "Adds.", "input_schema": FUNCTION["parameters"]}],
        max_tokens=9,
        stop_sequences=["!"],
        extra_body={"top_k": 4},
    )
    of_chat, of_response, of_message = server.calls[-3:]
    assert of_chat.messages == of_response.messages == of_message.messages == (QUESTION,)
    assert of_chat.tools == of_response.tools == of_message.tools == tuple(tools)
    assert of_chat.max_tokens == of_response.max_tokens == of_message.max_tokens == 9
    assert (of_chat.stop, of_response.stop, of_message.stop) == (("!",), (), ("!",))
    assert (of_chat.ignored, of_response.ignored, of_message.ignored) == (("temperature",), (), ("top_k",))


def test_clients_read_usage_and_the_reason_for_the_end(server: ProtocolServer, gpt: OpenAI, claude: Anthropic) -> None:
    server.answer = replace(server.answer, text="5", reasoning=None, tool_calls=(), finish="length")
    completion = gpt.chat.completions.create(model=MODEL, messages=[QUESTION])
    response = gpt.responses.create(model=MODEL, input="2 + 3?")
    answer = claude.messages.create(model=MODEL, max_tokens=8, messages=[QUESTION])
    assert (completion.choices[0].finish_reason, answer.stop_reason) == ("length", "max_tokens")
    assert response.incomplete_details and response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "5" and answer.content[0].to_dict() == {"type": "text", "text": "5"}
    for usage in (True, False):
        asked: Any = {"stream_options": {"include_usage": True}} if usage else {}
        chunks = list(gpt.chat.completions.create(model=MODEL, messages=[QUESTION], stream=True, **asked))
        assert [each.usage for each in chunks if each.usage] == [completion.usage][: int(usage)]
    last = list(gpt.responses.create(model=MODEL, input="2 + 3?", stream=True))[-1]
    assert last.type == "response.incomplete" and last.response == response
    with claude.messages.stream(model=MODEL, max_tokens=8, messages=[QUESTION]) as stream:
        assert stream.get_final_message().to_dict() == {**answer.to_dict(), "stop_details": None}
    assert completion.usage and response.usage and completion.usage.total_tokens == response.usage.total_tokens == 5
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (3, 2)


def test_clients_raise_their_own_errors_with_the_message(
    server: ProtocolServer, gpt: OpenAI, claude: Anthropic
) -> None:
    with pytest.raises(openai.BadRequestError, match="expected n to be 1, got 2: leave it out"):
        gpt.chat.completions.create(model=MODEL, messages=[QUESTION], n=2)
    with pytest.raises(openai.BadRequestError, match="expected previous_response_id to be null, got 'resp_1'"):
        gpt.responses.create(model=MODEL, input="?", previous_response_id="resp_1", stream=True)
    with pytest.raises(anthropic.BadRequestError, match=r"expected tool_choice auto or none, got \{'type': 'any'\}"):
        claude.messages.create(model=MODEL, max_tokens=8, messages=[QUESTION], tool_choice={"type": "any"})
    with pytest.raises(openai.AuthenticationError, match="expected the key of a sample"):
        gpt.with_options(api_key="other").chat.completions.create(model=MODEL, messages=[QUESTION])
    with pytest.raises(anthropic.AuthenticationError, match="expected the key of a sample"):
        claude.with_options(api_key="other").messages.create(model=MODEL, max_tokens=8, messages=[QUESTION])


def test_clients_list_models_and_count_tokens(server: ProtocolServer, gpt: OpenAI, claude: Anthropic) -> None:
    assert [each.id for each in gpt.models.list()] == [each.id for each in claude.models.list()] == [MODEL]
    assert claude.messages.count_tokens(model=MODEL, messages=[QUESTION]).input_tokens == TOKENS


def test_asynchronous_clients_stream(server: ProtocolServer) -> None:
    server.answer = replace(server.answer, text="5", tool_calls=(), finish="stop")

    async def ask() -> list[str | None]:
        async with (
            AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as gpt,
            AsyncAnthropic(base_url=server.url, auth_token=KEY, api_key=None) as claude,
            gpt.chat.completions.stream(model=MODEL, messages=[QUESTION]) as chunks,
            gpt.responses.stream(model=MODEL, input="?") as items,
            claude.messages.stream(model=MODEL, max_tokens=8, messages=[QUESTION]) as blocks,
        ):
            completion, response = await chunks.get_final_completion(), await items.get_final_response()
            return [completion.choices[0].message.content, response.output_text, await blocks.get_final_text()]

    assert asyncio.run(ask()) == ["5", "5", "5"]
