"""Check that environments leave the global generators of the run alone, and separate states for those that draw."""

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_rl.distributed import RunEndError
from lightning_rl.utils.seeding import fork_generators, seed_everything

CPU = torch.device("cpu")


class GeneratorError(RunEndError):
    """Draw of an environment from a global generator of the trainer."""


@contextmanager
def refuse_draws(name: str) -> Iterator[None]:
    """Compare the global generators before and after a call of an environment, in the main thread.

    In other threads a change cannot be attributed.

    Raises:
        GeneratorError: If they changed; names environment and generators.
    """
    if not _in_main_thread():
        yield
        return
    before = _fingerprints()
    try:
        yield
    except Exception:  # its row may fail while the others go on with the generators
        _compare(before, name)
        raise
    _compare(before, name)


def _compare(before: Mapping[str, object], name: str) -> None:
    changed = [generator for generator, state in _fingerprints().items() if state != before.get(generator, state)]
    if changed:
        raise GeneratorError(
            f"expected {name} to draw from its private generators, got draws from {' and '.join(changed)}, which "
            "changes what the run trains: use random.Random(seed) with the seed that reset gets, or run it in worker "
            "processes with Conversations(workers=)"
        )


def _fingerprints() -> dict[str, object]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, object] = {
        "Python's generator": random.getstate(),
        "NumPy's generator": (kind, keys.tobytes(), *rest),  # pyrefly: ignore[missing-attribute]
        "torch's generator": torch.default_generator.get_state().numpy().tobytes(),
    }
    if torch.cuda.is_initialized():
        states["torch's generator on the GPU"] = torch.cuda.get_rng_state().numpy().tobytes()
    return states


class OwnGenerators:
    """States of Python's, NumPy's and torch's global generators that belong to one environment.

    An environment that seeds or draws from the global generators uses these states, and those of the run do not change.
    So its draws do not depend on other conversations.

    Args:
        owner: Name of the environment, for errors.
        seed: Seed of the first states.

    Example:
        >>> own, before = OwnGenerators("a game", 3), random.getstate()
        >>> with own.in_place():
        ...     first = random.random()
        >>> random.getstate() == before, first == random.Random(3).random()
        (True, True)
    """

    def __init__(self, owner: str, seed: int = 0) -> None:
        self._owner = owner
        self._check_thread()
        with fork_generators(CPU):
            seed_everything(seed, CPU)
            self._states = _states()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Set these states for the duration of the block, and restore those of the run after it.

        Raises:
            GeneratorError: In any thread but the main one, where it would change what others draw.
        """
        self._check_thread()
        with fork_generators(CPU):
            python, numpy, torch_state = self._states
            random.setstate(python)
            np.random.set_state(numpy)
            torch.default_generator.set_state(torch_state)
            try:
                yield
            finally:
                self._states = _states()

    def _check_thread(self) -> None:
        if not _in_main_thread():
            raise GeneratorError(
                f"expected {self._owner}, which draws from the global generators, in the main thread or in a worker "
                f"process, got thread {threading.current_thread().name}: pass Conversations(workers=)"
            )


def _states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
