"""Requests that an engine has not answered yet."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from lightning_rl.generation.sampling_params import SamplingParams


class Asked(Protocol):
    """Request with sampling parameters."""

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters."""
        ...


class InFlight:
    """Unanswered requests of an engine with the version of the weights at their start. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Asked, int]] = {}  # by id() of the request

    def __reduce__(self) -> tuple[type["InFlight"], tuple[()]]:
        """Copy without requests: a copy of the module has sent none."""
        return InFlight, ()

    def add(self, request: Asked, version: int) -> None:
        """Add a request that is generated from weights of this version or newer."""
        with self._lock:
            self._open[id(request)] = request, version

    def discard(self, request: Asked) -> None:
        """Remove a request, if it is there."""
        with self._lock:
            self._open.pop(id(request), None)

    @contextmanager
    def holding(self, requests: Sequence[Asked], version: int) -> Iterator[None]:
        """Add requests inside the context; those still there are removed at its end."""
        with self._lock:
            self._open |= {id(request): (request, version) for request in requests}
        try:
            yield
        finally:
            with self._lock:
                for request in requests:
                    self._open.pop(id(request), None)

    def tokens(self) -> int:
        """Return the maximum number of tokens that may still be generated."""
        with self._lock:
            return sum(request.sampling.max_new_tokens for request, _ in self._open.values())

    def oldest(self) -> int | None:
        """Return the oldest version that a token in flight may come from; None without requests."""
        with self._lock:
            return min((version for _, version in self._open.values()), default=None)
