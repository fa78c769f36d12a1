"""InFlight: the requests that an engine has been asked for and has not answered, and how old their tokens may be."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from lightning_rl.generation.sampling import Sampling


class Asked(Protocol):
    """A request, as far as it counts here."""

    @property
    def sampling(self) -> Sampling:
        """How it is drawn."""
        ...


class InFlight:
    """Requests from when an engine takes them until it has answered them. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Asked, int]] = {}  # by the identity of the request

    def __reduce__(self) -> tuple[type["InFlight"], tuple[()]]:
        """A copy, such as that of a module whose weights are averaged, has asked for nothing."""
        return InFlight, ()

    def add(self, request: Asked, version: int) -> None:
        """Counts a request that is drawn from weights of this version or newer ones."""
        with self._lock:
            self._open[id(request)] = request, version

    def discard(self, request: Asked) -> None:
        """Counts it no more, if it is counted."""
        with self._lock:
            self._open.pop(id(request), None)

    @contextmanager
    def holding(self, requests: Sequence[Asked], version: int) -> Iterator[None]:
        """Counts requests while somebody draws for them; one that is discarded before that no longer."""
        with self._lock:
            self._open |= {id(request): (request, version) for request in requests}
        try:
            yield
        finally:
            with self._lock:
                for request in requests:
                    self._open.pop(id(request), None)

    def tokens(self) -> int:
        """How many tokens may still come at most: the limits of all responses together."""
        with self._lock:
            return sum(request.sampling.max_new_tokens for request, _ in self._open.values())

    def oldest(self) -> int | None:
        """The oldest version that a token in flight may come from; None if nothing is in flight."""
        with self._lock:
            return min((version for _, version in self._open.values()), default=None)
