"""Validation of environments, messages and token ids."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from environments.templates import tokenizer_of
from kit.conversations import Echo, wanted
from typing_extensions import override

from lightning_rl import FinishReason, SamplingParams
from lightning_rl.environments import (
    Action,
    Conversation,
    ConversationLimits,
    Environment,
    Message,
    ObjectEnvironment,
    StepResult,
    TokenStep,
)
from lightning_rl.environments.validation import check_reset, check_step, environment_of
from lightning_rl.generation import Completion, Request

TOKENIZER = tokenizer_of("qwen2.5")
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


class Shop(Environment):
    """Ends at once, and begins with given messages."""

    def __init__(self, opening: Sequence[Message] = ()) -> None:
        self.opening = opening

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        return self.opening

    @override
    def step(self, answer: Action) -> StepResult:
        return StepResult(done=True)


class Duck:
    """Environment in messages without the base class."""

    def reset(self, row: Any, seed: int) -> Any:
        """Begin."""

    def step(self, answer: Action) -> Any:
        """Action."""


class Unclosable:
    """Environment in token ids without ``close``."""

    def reset(self, row: Any, seed: int) -> Any:
        """Begin."""

    def step(self, token_ids: Sequence[int], finish: FinishReason) -> Any:
        """Action."""


class Stepper:
    """Object for TRL's trainer, with a tool called ``step``."""

    def reset(self, **row: Any) -> None:
        """Begin."""

    def step(self, direction: str) -> str:
        """Takes a step.

        Args:
            direction: of it.
        """
        return direction


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Duck, r"expected Duck, which has step\(answer\), to be .*: write class Duck\(Environment\), with"),
        (
            Unclosable,
            r"expected Unclosable, which has step\(token_ids, finish\), .* step\(token_ids, finish\) and close",
        ),
        (Environment, r"expected Environment to define step: write def step"),
        (object, r"got object: write def reset\(self, \*\*row\)"),
    ],
)
def test_an_incomplete_environment_is_refused(kind: type, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        environment_of(kind())


def test_complete_environments_are_accepted() -> None:
    for made in (Shop(), Echo()):
        assert environment_of(made) is made
    made = environment_of(Stepper())
    assert isinstance(made, ObjectEnvironment) and [tool.__name__ for tool in made.tools] == ["step"]


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


PLACES: dict[str, Callable[[list[Any]], object]] = {
    "reset": lambda messages: check_reset(Shop(), messages),
    "step": lambda messages: check_step(Shop(), StepResult(messages=messages)),
    "rewritten": lambda messages: check_step(Shop(), StepResult(rewritten=messages)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (["hello"], "to be a mapping such as .*, got 'hello'"),
        ([{"content": "x"}], "to have one of the roles .*user, tool.*, got None"),
        ([{"role": "alien", "content": "x"}], "to have one of the roles .*user, tool.*, got 'alien'"),
        (user(3), "to have a text as content, .*, got 3: write its text, or leave the message out"),
        (user(None), "to have a text as content, .*, got None: write its text, or leave the message out"),
        (user([{"type": "video", "video": "x"}]), r"to have a text as content, .*, got \[{'type': 'video'"),
    ],
)
def test_invalid_messages_are_refused(place: str, messages: list[Any], message: str) -> None:
    where = "Shop.reset" if place == "reset" else "Shop.step"
    with pytest.raises((TypeError, ValueError), match=f"expected message 0 of {where} {message}"):
        PLACES[place](messages)


@pytest.mark.parametrize("place", ["reset", "rewritten"])
def test_a_context_may_contain_answers_but_not_end_with_one(place: str) -> None:
    context = [
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        *user("?"),
    ]
    PLACES[place](context)
    with pytest.raises(ValueError, match=r"that the policy is to answer, got an answer as the last one: leave it out"):
        PLACES[place]([*context, {"role": "assistant", "content": "!"}])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 9], r"expected token ids in \[0, 9\), the policy's vocabulary, in what Echo.{} returns, got 9"),
        ([-1], r"expected token ids in \[0, 9\), .* in what Echo.{} returns, got -1"),
        ([np.int64(2**40)], "in what Echo.{} returns, got 1099511627776"),
        (["a"], "expected a token id in what Echo.{} returns, got str 'a'"),
        ("ab", "expected Echo.{} to return a list of token ids, got str 'ab'"),
    ],
)
def test_invalid_ids_are_refused(ids: Any, message: str) -> None:
    steps = [TokenStep(done=True) for _ in range(2)]
    for step, name in zip(steps, ("token_ids", "rewritten"), strict=True):
        object.__setattr__(step, name, ids)  # without the check of TokenStep
        with pytest.raises((TypeError, ValueError), match=message.format("step")):
            check_step(Echo(), step, 9)
    with pytest.raises((TypeError, ValueError), match=message.format("reset")):
        check_reset(Echo(), ids, 9)


@pytest.mark.parametrize("call", ["reset", "step"])
def test_an_id_outside_of_the_vocabulary_fails_its_conversation(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Echo, call, {"reset": lambda *_: [512], "step": lambda *_: TokenStep(token_ids=[512])}[call])
    first = Request(prefix_ids=(1,), sample_id=0, seed=0, sampling=SamplingParams(eos_token_ids=[9]))
    conversation = Conversation(Echo(), wanted(first), ConversationLimits(vocabulary=512))
    conversation.begin()
    if conversation.request is not None:
        conversation.receive(Completion(token_ids=(5,), logprobs=None, finish=FinishReason.STOP, version=0))
    trajectory = conversation.trajectory
    assert trajectory is not None and trajectory.finish == FinishReason.FAILED
    assert trajectory.failure is not None and trajectory.failure.cause == (
        f"ValueError: expected token ids in [0, 512), the policy's vocabulary, in what Echo.{call} returns, got 512"
    )
