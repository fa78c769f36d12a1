"""Programs with the official clients of OpenAI and Anthropic, from their first call to the tree of the sample."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from anthropic import Anthropic, AsyncAnthropic
from environments.templates import tokenizer_of
from kit.harnesses import LOOK, check_tree, fake, opened
from openai import AsyncOpenAI, OpenAI

from lightning_rl import FinishReason
from lightning_rl.environments import Program, converse
from lightning_rl.environments.program import PolicyEndpoint
from lightning_rl.generation import Completion, Request

TURNS = 4
QUESTION = {"role": "user", "content": "one"}
FUNCTION: Any = LOOK["function"]
CHAT_TOOLS: Any = [LOOK]
RESPONSE_TOOLS: Any = [{"type": "function", "strict": False, **FUNCTION}]
BLOCK_TOOLS: Any = [{"name": "look", "description": "Looks.", "input_schema": FUNCTION["parameters"]}]


def after_chat(message: Any) -> list[Any]:
    results = [{"role": "tool", "tool_call_id": call.id, "content": "two"} for call in message.tool_calls or ()]
    return [message, *(results or [QUESTION])]


def after_response(response: Any) -> list[Any]:
    calls = [item for item in response.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "two"} for call in calls]
    return [*response.output, *(results or [QUESTION])]


def after_blocks(answer: Any) -> list[Any]:
    calls = [block for block in answer.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "two"} for call in calls]
    return [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": results} if results else QUESTION,
    ]


def chat(row: Mapping[str, Any], model: PolicyEndpoint) -> float:
    messages: list[Any] = [QUESTION]
    with OpenAI(base_url=f"{model.url}/v1", api_key=model.key) as client:
        for turn in range(TURNS):
            options: Any = {"model": model.model, "messages": messages, "tools": CHAT_TOOLS}
            if turn % 2:
                with client.chat.completions.stream(**options) as events:
                    message = events.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(**options).choices[0].message
            messages += after_chat(message)
    return 1.0


async def chat_async(row: Mapping[str, Any], model: PolicyEndpoint) -> float:
    messages: list[Any] = [QUESTION]
    async with AsyncOpenAI(base_url=f"{model.url}/v1", api_key=model.key) as client:
        for turn in range(TURNS):
            options: Any = {"model": model.model, "messages": messages, "tools": CHAT_TOOLS}
            if turn % 2:
                async with client.chat.completions.stream(**options) as events:
                    message = (await events.get_final_completion()).choices[0].message
            else:
                message = (await client.chat.completions.create(**options)).choices[0].message
            messages += after_chat(message)
    return 1.0


def responses(row: Mapping[str, Any], model: PolicyEndpoint) -> float:
    items: list[Any] = [QUESTION]
    with OpenAI(base_url=f"{model.url}/v1", api_key=model.key) as client:
        for turn in range(TURNS):
            options: Any = {"model": model.model, "input": items, "tools": RESPONSE_TOOLS}
            if turn % 2:
                with client.responses.stream(**options) as events:
                    response: Any = events.get_final_response()
            else:
                response = client.responses.create(**options)
            items += after_response(response)
    return 1.0


async def responses_async(row: Mapping[str, Any], model: PolicyEndpoint) -> float:
    items: list[Any] = [QUESTION]
    async with AsyncOpenAI(base_url=f"{model.url}/v1", api_key=model.key) as client:
        for _ in range(TURNS):
            options: Any = {"model": model.model, "input": items, "tools": RESPONSE_TOOLS}
            items += after_response(await client.responses.create(**options))
    return 1.0


def blocks(row: Mapping[str, Any], model: PolicyEndpoint) -> float:
    messages: list[Any] = [QUESTION]
    with Anthropic(base_url=model.url, api_key=model.key) as client:
        for turn in range(TURNS):
            options: Any = {"model": model.model, "messages": messages, "tools": BLOCK_TOOLS, "max_tokens": 100}
            if turn % 2:
                with client.messages.stream(**options) as events:
                    answer: Any = events.get_final_message()
            else:
                answer = client.messages.create(**options)
            messages += after_blocks(answer)
    return 1.0


async def blocks_async(row: Mapping[str, Any], model: PolicyEndpoint) -> float:
    messages: list[Any] = [QUESTION]
    async with AsyncAnthropic(base_url=model.url, api_key=model.key) as client:
        for _ in range(TURNS):
            options: Any = {"model": model.model, "messages": messages, "tools": BLOCK_TOOLS, "max_tokens": 100}
            messages += after_blocks(await client.messages.create(**options))
    return 1.0


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
@pytest.mark.parametrize("run", [chat, chat_async, responses, responses_async, blocks, blocks_async])
def test_a_program_with_an_official_client_is_one_context(run: Any, name: str) -> None:
    conversations = opened(name, Program(run, timeout=60), [{"prompt": "one"}] * 6, turn_tokens=100)
    converse(conversations, fake(name))
    for sample in map(check_tree, conversations):
        assert sample.environment_reward == 1.0, sample.failure
        assert sample.metrics["turns"] == TURNS and len(sample.branches()) == 1
    messages = [message for sample in map(check_tree, conversations) for message in sample.messages]
    assert any("tool_calls" in each for each in messages) and any("reasoning_content" in each for each in messages)


STOP = [" {", "#"]


def stopped_chat(messages: list[Any], model: PolicyEndpoint, *, stream: bool) -> tuple[Any, ...]:
    with OpenAI(base_url=f"{model.url}/v1", api_key=model.key) as client:
        options: Any = {"model": model.model, "messages": messages, "stop": STOP}
        if stream:
            with client.chat.completions.stream(**options) as events:
                choice: Any = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**options).choices[0]
        messages += [choice.message, QUESTION]
        return choice.message.content, choice.finish_reason


def stopped_response(items: list[Any], model: PolicyEndpoint, *, stream: bool) -> tuple[Any, ...]:
    with OpenAI(base_url=f"{model.url}/v1", api_key=model.key) as client:
        options: Any = {"model": model.model, "input": items, "extra_body": {"stop": STOP}}
        if stream:
            with client.responses.stream(**options) as events:
                response: Any = events.get_final_response()
        else:
            response = client.responses.create(**options)
        items += [*response.output, QUESTION]
        return response.output_text, response.status


def stopped_blocks(messages: list[Any], model: PolicyEndpoint, *, stream: bool) -> tuple[Any, ...]:
    with Anthropic(base_url=model.url, api_key=model.key) as client:
        options: Any = {"model": model.model, "messages": messages, "stop_sequences": STOP, "max_tokens": 100}
        if stream:
            with client.messages.stream(**options) as events:
                answer: Any = events.get_final_message()
        else:
            answer = client.messages.create(**options)
        messages += [{"role": "assistant", "content": answer.content}, QUESTION]
        return answer.content[-1].text, answer.stop_reason, answer.stop_sequence


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
@pytest.mark.parametrize(
    ("ask", "ends"),
    [
        (stopped_chat, ["stop"]),
        (stopped_response, ["completed"]),
        (stopped_blocks, ["stop_sequence", " {"]),
    ],
)
def test_an_answer_ends_before_its_stop_string_and_goes_on_from_all_sampled_tokens(
    ask: Any, ends: list[str], name: str, *, stream: bool
) -> None:
    head = "<think>\nhm\n</think>\n\n" if name == "qwen3" else ""
    ids = tuple(tokenizer_of(name)(f'{head}it is {{"', add_special_tokens=False)["input_ids"])

    def script(request: Request) -> Completion:
        assert request.sampling.stop == tuple(STOP)
        logprobs = torch.full((len(ids),), -1.0)
        return Completion(token_ids=ids, logprobs=logprobs, finish=FinishReason.STOP, version=0)

    def run(row: Mapping[str, Any], model: PolicyEndpoint) -> float:
        messages: list[Any] = [QUESTION]
        found = [ask(messages, model, stream=stream) for _ in range(2)]
        return float(found == [("it is", *ends)] * 2)

    conversations = opened(name, Program(run), [{"prompt": "one"}], turn_tokens=100)
    converse(conversations, fake(name, script))
    sample = check_tree(conversations[0])
    assert sample.environment_reward == 1.0, sample.failure
    assert len(sample.branches()) == 1 and sample.messages[-1]["content"] == "it is"
