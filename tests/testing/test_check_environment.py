"""check_environment: sound environments pass, and each that breaks a property is named with the conversation."""

import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from kit.conversations import Echo
from kit.vision import picture
from typing_extensions import override

from lightning_rl import FinishReason
from lightning_rl.environments import Action, Environment, Message, Program, StepResult, TokenStep, ToolEnvironment
from lightning_rl.testing import PropertyError, check_environment
from lightning_rl.testing.environments import MEANINGS

STATE = random.Random(0).getstate()


def add(a: int) -> int:
    """Adds one.

    Args:
        a: a number.
    """
    return a + 1


class Guess(Environment):
    """Says higher or lower, by a number that the seed decides."""

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        self.secret = random.Random(seed).randrange(10)
        return [{"role": "user", "content": "a number?"}]

    @override
    def step(self, answer: Action) -> StepResult:
        if answer.text == str(self.secret):
            return StepResult(done=True, reward=1.0)
        return StepResult(messages=[{"role": "user", "content": f"not {answer.text[:20]}"}], metrics={"wrong": 1.0})


class Screen(Guess):
    """Shows pictures of Pillow, a new object each time."""

    @override
    def step(self, answer: Action) -> StepResult:
        shown = {"type": "image", "image": picture(("red", "blue")[self.secret % 2])}
        return StepResult(messages=[{"role": "user", "content": [shown]}])


class Lamb(Guess):
    """Takes numbers alone."""

    @override
    def step(self, answer: Action) -> StepResult:
        return StepResult(done=True, reward=float(answer.text))


class Speechless(Guess):
    """Returns nothing where it has nothing to say."""

    @override
    def step(self, answer: Action) -> Any:
        return StepResult(done=True) if answer.text else None


class Counting(Guess):
    """Counts the conversations of its class."""

    held = 0

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        Counting.held, self.secret = Counting.held + 1, 3
        return [{"role": "user", "content": str(Counting.held)}]


class Global(Guess):
    """Draws from the generator of everybody."""

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        return [{"role": "user", "content": str(random.random())}]


class Shared(Guess):
    """Keeps the secret of the last conversation that began in its class."""

    secret = 0

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        type(self).secret = seed
        return ()

    @override
    def step(self, answer: Action) -> StepResult:
        return StepResult(messages=[{"role": "user", "content": str(type(self).secret)}])


class Unclosable(Guess):
    """Closes what only a reset opens."""

    @override
    def close(self) -> None:
        del self.secret


class Objects(Guess):
    """Says what is no data."""

    @override
    def step(self, answer: Action) -> StepResult:
        return StepResult(messages=[{"role": "user", "content": "a", "extra": Lamb}])


class EndsAtOnce(Echo):
    """Cannot be told of an answer that was truncated."""

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        if finish == FinishReason.LENGTH:
            raise KeyError("no end")
        return super().step(token_ids, finish)


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("environment", "answers"),
    [
        (Guess, ["3", "4"]),
        (Screen, ["3", "4"]),
        (lambda: ToolEnvironment([add]), []),
        (Echo, [(3, 4), (5, 9)]),
        (Guess, [Action(text="3")]),
    ],
    ids=["messages", "pictures", "tools", "token ids", "answers"],
)
def test_a_sound_environment_passes(environment: Any, answers: Any) -> None:
    before = random.getstate()
    check_environment(environment, {"prompt": "?", "place": 3}, answers=answers)
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("environment", "broken", "observed"),
    [
        (Lamb, "environment_accepts", "ValueError: could not convert string to float"),
        (Speechless, "environment_steps", "TypeError: expected Speechless.step to return a StepResult, got None"),
        (Counting, "environment_repeats", "[{'role': 'user', 'content': '2'}]"),
        (Global, "environment_generators", "expected Global to draw from its private generators"),
        (Shared, "environment_isolation", "content': '1'"),
        (Unclosable, "environment_closes", "AttributeError: "),
        (Objects, "environment_ships", "TypeError: expected plain values, lists and mappings"),
        (lambda: (LOCK, Guess())[1], "environment_ships", "cannot pickle '_thread.lock' object"),
        (EndsAtOnce, "environment_accepts", "KeyError: 'no end'"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_property_is_named_with_what_to_do(environment: Any, broken: str, observed: str) -> None:
    with pytest.raises(PropertyError) as raised:
        check_environment(
            environment, {"prompt": "?", "place": 3}, answers=[(3, 4)] if environment is EndsAtOnce else ()
        )
    assert raised.value.property == broken
    assert observed in raised.value.finding.observed and raised.value.finding.cure
    assert MEANINGS[broken] in str(raised.value) and "seed 0" in str(raised.value)


def test_a_reset_that_reads_columns_needs_a_row() -> None:
    class Reads(Guess):
        @override
        def reset(self, row: Any, seed: int) -> Any:
            return [*super().reset(row, seed), {"role": "user", "content": row["question"]}]

    with pytest.raises(PropertyError, match="What to do: pass a row of the data as second argument"):
        check_environment(Reads)
    check_environment(Reads, {"prompt": "?", "question": "2 + 2"})


def test_a_program_is_checked_by_a_fit() -> None:
    with pytest.raises(ValueError, match=r"expected an environment, got Program: check it by a fit"):
        check_environment(Program(lambda *_: 1.0))
