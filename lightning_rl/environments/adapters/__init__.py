"""Adapters: tasks and environments of other packages, each an extra, and imported only when it is used."""

from lightning_rl.environments.adapters.verifiers import Verifiers

__all__ = ["Verifiers"]
