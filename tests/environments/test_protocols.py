"""Shapes: an object that is nearly an environment is told what it lacks before anything is generated."""

from collections.abc import Sequence
from typing import Any

import pytest
from kit.conversations import Echo
from typing_extensions import override

from lightning_rl import FinishReason
from lightning_rl.environments import Action, Environment, ObjectEnvironment, StepResult
from lightning_rl.environments.protocols import environment_of


class Sound(Environment):
    """Ends at once."""

    @override
    def step(self, answer: Action) -> StepResult:
        return StepResult(done=True)


class Duck:
    """Would be an environment in messages if it said so."""

    def reset(self, row: Any, seed: int) -> Any:
        """Begins."""

    def step(self, answer: Action) -> Any:
        """Answers."""


class Stepping:
    """Has a step alone."""

    def step(self, answer: Action) -> Any:
        """Answers."""


class Unclosable:
    """Would be an environment in token ids if it could be closed."""

    def reset(self, row: Any, seed: int) -> Any:
        """Begins."""

    def step(self, token_ids: Sequence[int], finish: FinishReason) -> Any:
        """Answers."""


class Crowded:
    """Asks for more than anybody gives."""

    def reset(self, row: Any, seed: int) -> Any:
        """Begins."""

    def step(self, token_ids: Sequence[int], finish: FinishReason, more: int) -> Any:
        """Answers."""

    def close(self) -> None:
        """Ends."""


class Generous:
    """Asks for more than anybody gives, and does without."""

    def reset(self, row: Any, seed: int) -> Any:
        """Begins."""

    def step(self, token_ids: Sequence[int], finish: FinishReason, more: int = 0) -> Any:
        """Answers."""

    def close(self) -> None:
        """Ends."""


class Deaf(Sound):
    """Takes no answer."""

    def step(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Answers."""


class Seedless(Sound):
    """Takes no seed."""

    def reset(self, row: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Begins."""


class Later(Sound):
    """Begins when it is awaited."""

    async def reset(self, row: Any, seed: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Begins."""


class Yielding(Sound):
    """Says one thing after the other."""

    @override
    def step(self, answer: Action) -> Any:
        yield StepResult(done=True)


class Stepper:
    """As TRL's trainer takes it, with a tool that is called as others call what takes an answer."""

    def reset(self, **row: Any) -> None:
        """Begins."""

    def step(self, direction: str) -> str:
        """Takes a step.

        Args:
            direction: of it.
        """
        return direction


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Duck, r"expected Duck, which has step\(answer\), to be an Environment: write class Duck\(Environment\)"),
        (Stepping, r"expected Stepping, which has step\(answer\), to be an Environment"),
        (Unclosable, r"Unclosable, which has step\(token_ids, finish\), .* without close: write def close\(self\)"),
        (
            Crowded,
            r"expected Crowded.step to be called with token_ids, finish, got step\(token_ids, finish, more\)|got",
        ),
        (Deaf, r"expected Deaf.step to be called with answer, got step\(\): write def step\(self, answer\)"),
        (Seedless, r"Seedless.reset to be called with row, seed, got reset\(row\): write def reset\(self, row, seed\)"),
        (
            Later,
            r"expected Later.reset to be a plain function, got one that is async: write def reset\(self",
        ),
        (Yielding, r"expected Yielding.step to return, got a function that yields"),
        (Environment, r"expected Environment to define step: write def step"),
        (object, r"got object: write def reset\(self, \*\*row\)"),
    ],
)
def test_what_is_nearly_an_environment_is_told_what_it_lacks(kind: type, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        environment_of(kind())


@pytest.mark.parametrize("kind", [Sound, Echo, Generous])
def test_environments_are_taken_as_they_are(kind: type) -> None:
    made = kind()
    assert environment_of(made) is made


def test_a_tool_may_be_called_step() -> None:
    made = environment_of(Stepper())
    assert isinstance(made, ObjectEnvironment) and [tool.__name__ for tool in made.tools] == ["step"]
