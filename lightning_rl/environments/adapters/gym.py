"""Environments with the interface of gymnasium that use text, for one player.

Source: Towers et al., Gymnasium: A Standard Interface for Reinforcement Learning Environments, arXiv:2407.17032.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from lightning_rl.environments.environment import Action, Environment, StepResult
from lightning_rl.environments.generators import OwnGenerators
from lightning_rl.samples import Message


def begin(row: Mapping[str, Any], text: str) -> Sequence[Message]:
    """Return the first messages of a conversation: the system messages of the row's prompt, and a text.

    Example:
        >>> begin({"prompt": "play"}, "Guess my number.")
        [{'role': 'user', 'content': 'Guess my number.'}]
    """
    prompt = row.get("prompt")
    messages = [] if isinstance(prompt, str) or not isinstance(prompt, Sequence) else prompt
    system = [message for message in messages if isinstance(message, Mapping) and message.get("role") == "system"]
    return [*system, {"role": "user", "content": text}]


class GymEnvironment(Environment):
    """Environment with ``reset(seed=) -> (text, info)`` and ``step(text) -> (text, reward, terminated, truncated,
    info)``.

    Its first text replaces the row's prompt, except for the system messages. The text of an answer is the action; an
    answer that was truncated is none, and ends the conversation. The environment has its own states of the global
    generators.

    Args:
        make: Function that makes the environment.

    Raises:
        ValueError: If it has no ``reset`` and ``step``.
        GeneratorError: In a thread; see :class:`~lightning_rl.environments.generators.OwnGenerators`.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._generators = OwnGenerators(type(self).__name__)
        with self._generators.in_place():
            self._game = make()
        name = type(self._game).__name__
        for method in ("reset", "step"):
            if not callable(getattr(self._game, method, None)):
                raise ValueError(f"expected an environment with reset and step, got {name}")

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        with self._generators.in_place():
            observation, info = self._game.reset(seed=seed)
        return begin(row, self._text(observation, info))

    @override
    def step(self, answer: Action) -> StepResult:
        if answer.truncated:
            return StepResult(done=True)
        with self._generators.in_place():
            observation, reward, terminated, truncated, info = self._game.step(answer.text)
        if terminated or truncated:
            return StepResult(done=True, reward=float(reward))
        return StepResult(messages=[{"role": "user", "content": self._text(observation, info)}], reward=float(reward))

    @override
    def close(self) -> None:
        if callable(close := getattr(self._game, "close", None)):
            with self._generators.in_place():
                close()

    def _text(self, observation: str, info: Mapping[str, Any]) -> str:
        """Return the text for the policy."""
        del info
        if not isinstance(observation, str):
            raise TypeError(
                f"expected {type(self._game).__name__} to observe text, got {type(observation).__name__} "
                f"{observation!r:.200}: wrap the environment in one that writes it as text"
            )
        return observation
