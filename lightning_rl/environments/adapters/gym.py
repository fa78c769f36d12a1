"""GymEnvironment: an environment of gymnasium's shape that speaks in text, for one player.

Source: Towers et al., Gymnasium: A Standard Interface for Reinforcement Learning Environments, arXiv:2407.17032.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from lightning_rl.environments.adapters.generator_states import OwnGenerators
from lightning_rl.environments.environment import Action, Environment, Message, StepResult


def begin(row: Mapping[str, Any], text: str) -> Sequence[Message]:
    """The messages of a conversation that the environment opens: it takes the place of the row's prompt, of which the
    system messages stay.

    Example:
        >>> begin({"prompt": "play"}, "Guess my number.")
        [{'role': 'user', 'content': 'Guess my number.'}]
    """
    prompt = row.get("prompt")
    messages = [] if isinstance(prompt, str) or not isinstance(prompt, Sequence) else prompt
    system = [message for message in messages if isinstance(message, Mapping) and message.get("role") == "system"]
    return [*system, {"role": "user", "content": text}]


class GymEnvironment(Environment):
    """Plays an environment with ``reset(seed=) -> (text, info)`` and ``step(text) -> (text, reward, terminated,
    truncated, info)``.

    Its first text takes the place of the row's prompt, of which the system messages stay. The text of an answer is the
    action; one that was cut off is none, and ends the conversation. The global generators that the environment seeds
    and draws from are its own.

    Args:
        make: makes the environment.

    Raises:
        ValueError: if it is for several players, or has no ``reset`` and ``step``.
        GeneratorError: in a thread; see :class:`~lightning_rl.environments.adapters.generator_states.OwnGenerators`.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        if not callable(make):
            raise ValueError(
                f"expected make to be a function that makes an environment, got {make!r:.200}: write a lambda"
            )
        self._generators = OwnGenerators(type(self).__name__)
        with self._generators.in_place():
            self._game = make()
        for method in ("reset", "step"):
            if not callable(getattr(self._game, method, None)):
                raise ValueError(f"expected an environment with reset and step, got {type(self._game).__name__}")
        self._check_players()

    def _check_players(self) -> None:
        agents = getattr(self._game, "possible_agents", None)
        if agents is not None:
            raise ValueError(
                f"expected an environment for one player, got {type(self._game).__name__} for {list(agents)}: a "
                "conversation has one policy, so play the others inside of the environment"
            )
        if getattr(self._game, "num_envs", None) is not None:
            raise ValueError(
                f"expected one environment, got {type(self._game).__name__} of {self._game.num_envs}: every "
                "conversation makes its own"
            )

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        with self._generators.in_place():
            said = self._game.reset(seed=seed)
        self._check("reset", said, 2)
        return begin(row, self._text(*said))

    @override
    def step(self, answer: Action) -> StepResult:
        if answer.cut_off:
            return StepResult(done=True)
        with self._generators.in_place():
            said = self._game.step(answer.text)
        self._check("step", said, 5)
        observation, reward, terminated, truncated, info = said
        if terminated or truncated:
            return StepResult(done=True, reward=float(reward))
        return StepResult(messages=[{"role": "user", "content": self._text(observation, info)}], reward=float(reward))

    @override
    def close(self) -> None:
        close = getattr(self._game, "close", None)
        if callable(close):
            with self._generators.in_place():
                close()

    def _text(self, observation: str, info: Mapping[str, Any]) -> str:
        """What the policy reads."""
        del info
        return observation

    def _check(self, call: str, said: Any, number: int) -> None:
        """Refuses what is not of gymnasium's shape, or no text."""
        where = f"{type(self._game).__name__}.{call}"
        if not isinstance(said, tuple) or len(said) != number:
            raise TypeError(f"expected {where} to return a tuple of {number}, got {said!r:.200}")
        if not isinstance(said[0], str):
            raise TypeError(
                f"expected {where} to say text, got {type(said[0]).__name__} {said[0]!r:.200}: wrap the environment in "
                "one that writes it out"
            )
