"""GemEnvironment: games, puzzles and questions of GEM.

Source: Liu et al., GEM: A Gym for Agentic LLMs, arXiv:2510.01051.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from typing_extensions import override

from adapters.foreign import check_name, check_options, load
from lightning_rl.environments.adapters.gym import GymEnvironment


class GemEnvironment(GymEnvironment):
    """An environment of gem by its name.

    The policy reads what the environment observes between the ``prefix`` and the ``suffix`` of its information, where
    it has them. What was said before is in the conversation: no wrapper has to repeat it.

    Args:
        env_id: its name, such as ``"game:GuessTheNumber-v0"``.
        options: of the environment, which take the place of those that belong to the name.

    Raises:
        ImportError: if gem is missing; the message says how to install it.
        ValueError: if there is no such environment, or it is for several players.
    """

    def __init__(self, env_id: str, options: Mapping[str, Any] | None = None) -> None:
        check_options(options=options)
        gem = load("gem", extra="gem")
        check_name(env_id, load("gem.envs.registration", extra="gem").ENV_REGISTRY, option="env_id", library="gem")
        super().__init__(partial(gem.make, env_id, **(options or {})))

    @override
    def _text(self, observation: str, info: Mapping[str, Any]) -> str:
        parts = (info.get("prefix"), observation, info.get("suffix"))
        return "\n".join(part.strip("\n") for part in parts if part)
