"""Form: messages and token ids that no template or policy can take are refused wherever an environment says them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from environments.templates import close_of, tokenizer_of
from kit.conversations import Echo
from typing_extensions import override

from lightning_rl import FinishReason, SamplingParams
from lightning_rl.environments import (
    Action,
    Bridge,
    Conversation,
    ConversationLimits,
    Environment,
    Message,
    StepResult,
    TokenStep,
)
from lightning_rl.environments.environment_schema import check_reset, check_step
from lightning_rl.environments.messages import MessageEnvironment
from lightning_rl.environments.parsing import plain_text
from lightning_rl.generation import Completion, Request

TOKENIZER = tokenizer_of("qwen2.5")
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


class Shop(Environment):
    """Says what it is told to."""

    @override
    def step(self, answer: Action) -> StepResult:
        return StepResult(done=True)


def user(content: Any, **more: Any) -> list[Any]:
    return [{"role": "user", "content": content, **more}]


PLACES: dict[str, Callable[[list[Any]], object]] = {
    "reset": lambda messages: check_reset(Shop(), messages),
    "step": lambda messages: check_step(Shop(), StepResult(messages=messages)),
    "rewritten": lambda messages: check_step(Shop(), StepResult(rewritten=messages)),
}

NO_MESSAGES: list[tuple[list[Any], str]] = [
    (["hello"], "to be a mapping such as .*, got str 'hello'"),
    ([{"content": "x"}], "to have one of the roles .*user, tool.*, got None"),
    ([{"role": "alien", "content": "x"}], "to have one of the roles .*user, tool.*, got 'alien'"),
    ([{"role": ["user"], "content": "x"}], r"to have one of the roles .*user, tool.*, got \['user'\]"),
    ([{"role": "user", "text": "x"}], "to have a text as content, .*, got None"),
    (user(3), "to have a text as content, .*, got 3: images and other parts are not supported"),
    (user(None), "to have a text as content, .*, got None"),
    (user([{"type": "text", "text": "x"}]), r"to have a text as content, .*, got \[{'type': 'text'"),
    (user("x", name=3), "to have a text as name, got 3"),
    (user("half \ud800"), r"got half a surrogate pair in 'half \\ud800': write text.encode\(\"utf-8\", \"replace\"\)"),
    (user("x", name="\udfff"), "got half a surrogate pair"),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("messages", "message"), NO_MESSAGES)
def test_what_is_no_message_is_refused_wherever_it_is_said(place: str, messages: list[Any], message: str) -> None:
    where = "Shop.reset" if place == "reset" else "Shop.step"
    with pytest.raises((TypeError, ValueError), match=f"expected .*message 0 of {where}.*{message}|{message}"):
        PLACES[place](messages)


@pytest.mark.parametrize("place", PLACES)
def test_what_is_a_message_passes_wherever_it_is_said(place: str) -> None:
    messages = [{"role": "tool", "content": "", "name": None, "tool_call_id": "a"}, *user("é 😀")]
    assert PLACES[place](messages) in (messages, StepResult(messages=messages), StepResult(rewritten=messages))


@pytest.mark.parametrize("place", ["reset", "rewritten"])
def test_a_context_may_hold_answers_and_no_answer_to_come(place: str) -> None:
    said = [
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        *user("?"),
    ]
    PLACES[place](said)
    with pytest.raises(ValueError, match=r"that the policy is to answer, got an answer as the last one: leave it out"):
        PLACES[place]([*said, {"role": "assistant", "content": "!"}])
    with pytest.raises(TypeError, match=r"message 1 of .* to have a list of mappings as tool_calls, got 'f'"):
        PLACES[place]([said[0], {"role": "assistant", "content": "", "tool_calls": "f"}, said[2]])


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_users_and_tools_alone_answer_a_policy(role: str) -> None:
    with pytest.raises(ValueError, match=f"message 0 of Shop.step to have one of the roles user, tool, got '{role}'"):
        PLACES["step"]([{"role": role, "content": "x"}])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 9], r"expected token ids in \[0, 9\), the policy's vocabulary, in what Echo.{} returns, got 9"),
        ([-1], r"expected token ids in \[0, 9\), .* in what Echo.{} returns, got -1"),
        ([np.int64(2**40)], "in what Echo.{} returns, got 1099511627776"),
        ([True], "expected a token id in what Echo.{} returns, got bool True"),
        (["a"], "expected a token id in what Echo.{} returns, got str 'a'"),
        ("ab", "expected Echo.{} to return a list of token ids, got str 'ab'"),
    ],
)
def test_what_is_no_id_of_the_policy_is_refused_wherever_it_is_said(ids: Any, message: str) -> None:
    for call, check in {
        "reset": lambda: check_reset(Echo(), ids, 9),
        "step": lambda: check_step(Echo(), step_of("token_ids", ids), 9),
        "step ": lambda: check_step(Echo(), step_of("rewritten", ids), 9),
    }.items():
        with pytest.raises((TypeError, ValueError), match=message.format(call.strip())):
            check()
    with pytest.raises(ValueError, match=r"expected token ids of at least 0 in what Echo.reset returns, got -3"):
        check_reset(Echo(), [-3])


def step_of(name: str, ids: Any) -> TokenStep:
    """A step whose ids are put there behind its own check."""
    step = TokenStep(done=True)
    object.__setattr__(step, name, ids)
    return step


def begin(environment: Any, limits: ConversationLimits) -> Conversation:
    sampling = SamplingParams(max_new_tokens=99, eos_token_ids=sorted(close_of("qwen2.5")))
    talk = Conversation(environment, Request(prefix_ids=(1,), sample_id=0, seed=0, sampling=sampling), limits, "shop")
    talk.begin({}, 0)
    return talk


class Foreign(Echo):
    """Says an id that no policy here knows, at a place of its choice."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        return [7, 512] if self.place == "reset" else []

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        said: dict[str, Any] = {self.place: [512]}
        return TokenStep(**said)


@pytest.mark.parametrize("place", ["reset", "token_ids", "rewritten"])
def test_an_id_outside_of_the_vocabulary_fails_its_conversation_alone(place: str) -> None:
    talk = begin(Foreign(place), ConversationLimits(vocabulary=512))
    if place != "reset":
        talk.receive(Completion(token_ids=(5,), logprobs=None, finish=FinishReason.STOP, version=0))
    assert talk.transcript is not None and talk.transcript.finish == FinishReason.FAILED
    call = "reset" if place == "reset" else "step"
    said = (
        f"ValueError: expected token ids in [0, 512), the policy's vocabulary, in what Foreign.{call} returns, got 512"
    )
    assert talk.transcript.outcome.failure == said


class Opened(Shop):
    """Begins with what it is told to."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        return self.messages


def spoken(environment: Environment, prompt: Sequence[Message] = ()) -> MessageEnvironment:
    return MessageEnvironment(environment, Bridge(TOKENIZER, close_of("qwen2.5")), plain_text(TOKENIZER), (), prompt)


def test_entries_of_none_are_not_written() -> None:
    said = [*user("?"), {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "1"}]
    assert "None" not in TOKENIZER.decode(spoken(Opened(said)).reset({}, 0))


def test_the_prompt_of_a_row_is_held_to_the_same_form() -> None:
    with pytest.raises(ValueError, match=r"message 0 of the row's prompt to have one of the roles .*, got 'human'"):
        spoken(Opened(()), [{"role": "human", "content": "?"}]).reset({}, 0)
