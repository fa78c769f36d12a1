"""Global generators: an environment that draws from those of the trainer is named; its own states are kept apart."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from kit.chatter import generator_states
from kit.conversations import Talk, wanted
from typing_extensions import override

from lightning_rl import FinishReason, SamplingParams
from lightning_rl.environments import Conversation, ConversationLimits, TokenStep
from lightning_rl.environments.generators import GeneratorError, OwnGenerators
from lightning_rl.generation import Completion, Request
from lightning_rl.utils.seeding import fork_generators

FIRST = Request(prefix_ids=(1,), sample_id=0, seed=0, sampling=SamplingParams(max_new_tokens=4, eos_token_ids=[9]))
ANSWER = Completion(token_ids=(9,), logprobs=torch.zeros(1), finish=FinishReason.STOP, version=0)


class Drawing(Talk):
    """Draws in its reset and in its step."""

    def __init__(self, reset: Callable[[], Any], step: Callable[[], Any]) -> None:
        self.draws = reset, step

    @override
    def reset(self, row: Any, seed: int) -> Sequence[int]:
        self.draws[0]()
        return ()

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        self.draws[1]()
        return TokenStep(done=True)


def talk(reset: Callable[[], Any], step: Callable[[], Any]) -> None:
    with fork_generators(torch.device("cpu")):
        conversation = Conversation(Drawing(reset, step), wanted(FIRST), ConversationLimits())
        conversation.begin()
        conversation.receive(ANSWER)
        assert conversation.trajectory is not None and conversation.trajectory.finish == FinishReason.STOP


DRAWS = [
    (random.random, "Python's generator"),
    (np.random.random, "NumPy's generator"),
    (lambda: torch.rand(()), "torch's generator"),
    (lambda: random.seed(3), "Python's generator"),
    (lambda: torch.manual_seed(3), "torch's generator"),
]


@pytest.mark.parametrize(("draw", "name"), DRAWS)
@pytest.mark.parametrize("in_reset", [True, False])
def test_who_draws_from_a_generator_of_the_trainer_is_named(draw: Any, name: str, in_reset: bool) -> None:
    nothing = lambda: None  # noqa: E731
    with pytest.raises(
        GeneratorError, match=f"expected Drawing to draw from its private generators, got draws from {name}"
    ):
        talk(*((draw, nothing) if in_reset else (nothing, draw)))


class Seeding(Drawing):
    """Seeds a generator when it is made, as some packages of environments do."""

    def __init__(self) -> None:
        random.seed(3)


def test_who_seeds_a_generator_when_it_is_made_is_named() -> None:
    message = "expected environment shop to draw from its private generators, got draws from Python's generator"
    with fork_generators(torch.device("cpu")), pytest.raises(GeneratorError, match=message):
        Conversation(None, wanted(FIRST), ConversationLimits(), "shop", Seeding).begin()


def test_who_draws_and_then_fails_is_named() -> None:
    """Its row would fail alone, but those that follow would train on other draws."""

    def draw_and_raise() -> None:
        random.random()
        raise OSError("gone")

    with pytest.raises(GeneratorError, match="expected Drawing to draw from its private generators"):
        talk(draw_and_raise, lambda: None)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_draws_and_seeds_inside_leave_the_run_s_generators_where_they_are() -> None:
    before, own = generator_states(), OwnGenerators("a game")
    with own.in_place():
        draws()
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
    assert generator_states() == before


def test_each_goes_on_where_it_was_whatever_others_do() -> None:
    alone, first, second = OwnGenerators("one", 3), OwnGenerators("one", 3), OwnGenerators("other", 4)
    with alone.in_place():
        expected = [draws(), draws()]
    seen = []
    for _ in range(2):
        with first.in_place():
            seen.append(draws())
        with second.in_place():
            draws()
        draws()
    assert seen == expected


def test_a_thread_is_refused() -> None:
    message = (
        r"expected a game, which draws from the global generators, in the main thread .* Conversations\(workers=\)"
    )
    with ThreadPoolExecutor(1) as threads, pytest.raises(GeneratorError, match=message):
        threads.submit(OwnGenerators, "a game").result()
