"""Check that environments in the trainer's process do not draw from global generators, which belong to the run."""

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from lightning_rl.distributed import RunEndError


class GeneratorError(RunEndError):
    """Draw of an environment from a global generator of the trainer."""


@contextmanager
def refuse_draws(name: str) -> Iterator[None]:
    """Compare the global generators before and after a call of an environment, in the main thread.

    In other threads a change cannot be attributed.

    Args:
        name: Name of the environment.

    Raises:
        GeneratorError: If they changed; names environment and generators.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _states()
    try:
        yield
    except Exception:  # its row may fail while the others go on with the generators
        _compare(before, name)
        raise
    _compare(before, name)


def _compare(before: Mapping[str, object], name: str) -> None:
    moved = [generator for generator, state in _states().items() if state != before.get(generator, state)]
    if moved:
        raise GeneratorError(
            f"expected {name} to draw from its private generators, got draws from {' and '.join(moved)}, which changes "
            "what the run trains: use random.Random(seed) with the seed that reset gets, or run it in worker "
            "processes with environment_workers="
        )


def _states() -> dict[str, object]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, object] = {
        "Python's generator": random.getstate(),
        "NumPy's generator": (kind, keys.tobytes(), *rest),  # pyright: ignore[reportAttributeAccessIssue]
        "torch's generator": torch.default_generator.get_state().numpy().tobytes(),
    }
    if torch.cuda.is_initialized():
        states["torch's generator on the GPU"] = torch.cuda.get_rng_state().numpy().tobytes()
    return states
