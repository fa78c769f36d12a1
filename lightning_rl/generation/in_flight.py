"""Requests that an engine has not answered yet."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning_rl.samples import Request


class InFlight:
    """Unanswered :class:`.Request` objects with the version of the weights at their start, for any thread."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int, int, int], tuple[Request, int]] = {}  # by Request.key

    def add(self, request: Request, version: int) -> None:
        """Add a request that is generated from weights of this version or newer."""
        self._open[request.key] = request, version

    def discard(self, request: Request) -> None:
        """Remove a request, if it is there."""
        self._open.pop(request.key, None)

    @contextmanager
    def holding(self, requests: Sequence[Request], version: int) -> Iterator[None]:
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
