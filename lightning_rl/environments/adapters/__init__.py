"""Adapters: environments of verifiers and of gymnasium's shape, each imported only when it is used."""

from lightning_rl.environments.adapters.gym import GymEnvironment
from lightning_rl.environments.adapters.verifiers import Verifiers

__all__ = ["GymEnvironment", "Verifiers"]
