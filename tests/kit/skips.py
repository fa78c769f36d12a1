"""Skipped tests by the command that runs them, and the sandbox that some need."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from lightning_rl.rewards import Sandbox, SandboxUnavailable

ENVIRONMENTS = {
    "agents": "make test-agents", "comet_ml": "make test-loggers", "compose_spec": "make test-launch",
    "gem": "make test-gem", "kubernetes_validate": "make test-launch", "liger_kernel": "make test-liger",
    "mlflow": "make test-loggers", "openenv": "make test-openenv", "ray": "make test-ray",
    "reasoning_gym": "make test-reasoning-gym",
    "tensorboard": "make test-loggers", "textarena": "make test-textarena", "verifiers": "make test-verifiers",
    "wandb": "make test-loggers",
}  # fmt: skip
"""Packages that `.venv` lacks, with the command that installs them elsewhere and tests with them."""


def need_sandbox() -> None:
    """Skip the test if this machine cannot isolate programs."""
    try:
        Sandbox().check()
    except SandboxUnavailable as error:
        pytest.skip(f"{str(error).partition(': install ')[0]}: apt-get install bubblewrap")


def command_of(reason: str) -> str:
    """Return the command that runs a skipped test: the end of its reason, or that of the package which it lacks."""
    lacking = re.search(r"could not import '(\w+)", reason)
    command = ENVIRONMENTS.get(lacking[1]) if lacking else reason.rpartition(": ")[2]
    return command or reason


def lines(reasons: Iterable[str]) -> Iterator[str]:
    """Yield a line for each command: the number of its tests, and the command."""
    for command, number in sorted(Counter(map(command_of, reasons)).items()):
        yield f"{number:4}  {command}"
