"""PhaseTimes: how long each phase took, synchronised with the device once per phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_rl.corrections import Stat


class PhaseTimes:
    """Seconds by phase, collected until they are taken."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    def start(self) -> None:
        """Begins the time of an optimizer step, its rollout included; a validation before it does not count."""
        self._started, self._seconds = time.perf_counter(), {}

    def elapsed(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._started

    @contextmanager
    def phase(self, name: str, device: torch.device) -> Iterator[None]:
        """Measures what happens inside."""
        start = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def stats(self) -> dict[str, Stat]:
        """``time/<phase>`` of every phase since the last call, in seconds."""
        stats = Stat.singles({f"time/{name}": torch.tensor(seconds) for name, seconds in self._seconds.items()})
        self._seconds = {}
        return stats
