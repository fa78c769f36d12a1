"""Requests that an engine has not answered yet."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class InFlight:
    """Unanswered :class:`.Request` objects with the version of the weights at their start, for any thread."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Any, int]] = {}  # by id() of the request

    def add(self, request: Any, version: int) -> None:
        """Add a request that is generated from weights of this version or newer."""
        self._open[id(request)] = request, version

    def discard(self, request: Any) -> None:
        """Remove a request, if it is there."""
        self._open.pop(id(request), None)

    @contextmanager
    def holding(self, requests: Sequence[Any], version: int) -> Iterator[None]:
        """Add requests inside the context; those still there are removed at its end."""
        for request in requests:
            self.add(request, version)
        try:
            yield
        finally:
            for request in requests:
                self.discard(request)

    def tokens(self) -> int:
        """Return the maximum number of tokens that may still be generated."""
        return sum(request.sampling.max_new_tokens for request, _ in list(self._open.values()))

    def oldest(self) -> int | None:
        """Return the oldest version that a token in flight may come from; None without requests."""
        return min((version for _, version in list(self._open.values())), default=None)
