"""Adapters: tasks and environments of other packages, each an extra, and imported only when it is used."""

from lightning_rl.environments.adapters.gem import GemEnvironment
from lightning_rl.environments.adapters.gym import GymEnvironment
from lightning_rl.environments.adapters.openenv import OpenEnvEnvironment
from lightning_rl.environments.adapters.reasoning_gym import ReasoningGym, ReasoningGymScore
from lightning_rl.environments.adapters.textarena import TextArenaEnvironment
from lightning_rl.environments.adapters.verifiers import Verifiers

__all__ = [
    "GemEnvironment",
    "GymEnvironment",
    "OpenEnvEnvironment",
    "ReasoningGym",
    "ReasoningGymScore",
    "TextArenaEnvironment",
    "Verifiers",
]
