"""Several nodes on one machine: one torchrun per node."""

from collections.abc import Sequence
from pathlib import Path

from kit.agents import Agents


def run_nodes(number: int, command: Sequence[str], folder: Path, *, seconds: float = 240) -> None:
    """Run a command on each of several nodes of one process, in a folder, until all of them end without an error."""
    with Agents(folder, command, nodes=number, devices=1, limit=seconds) as agents:
        agents.finish()
