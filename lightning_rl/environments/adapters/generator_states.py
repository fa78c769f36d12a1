"""Generators: states of the global generators that belong to one conversation, in place while its environment runs."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_rl.environments.generators import GeneratorError
from lightning_rl.utils.seeding import fork_generators, seed_everything

CPU = torch.device("cpu")


class OwnGenerators:
    """Python's, NumPy's and torch's global generators as one environment sees them.

    What draws from the global generators, or seeds them, draws from these, and those of the run stay where they were.
    So an environment draws the same however its steps are interleaved with those of others.

    Args:
        owner: whose generators they are, for errors.
        seed: of their first states.

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
        """Puts them in the place of the run's, which come back however the block ends.

        Raises:
            GeneratorError: in any thread but the main one, where a swap would reach what others draw meanwhile.
        """
        self._check_thread()
        with fork_generators(CPU):
            for put, state in zip((random.setstate, np.random.set_state, _set_torch), self._states, strict=True):
                put(state)
            try:
                yield
            finally:
                self._states = _states()

    def _check_thread(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise GeneratorError(
                f"expected {self._owner}, which draws from the global generators, in the main thread or in a process "
                f"of its own, got thread {threading.current_thread().name}: pass environment_workers="
            )


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _set_torch(state: torch.Tensor) -> None:
    torch.default_generator.set_state(state)
