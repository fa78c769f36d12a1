"""Streaming of completions from an engine to a callback, one by one."""

import threading
from collections.abc import Callable, Sequence

from lightning_rl.generation import Completion, EngineError, Request

Arrived = Callable[[int, Completion], None]
"""Callback with the index of a request and its completion; completions arrive one at a time, in any order."""


class Arrivals:
    """An :class:`~lightning_rl.generation.engine.Exchange` over a fixed list of requests.

    Args:
        requests: Requests to generate.
        arrived: Callback for each completion; runs in the engine's thread.
    """

    def __init__(self, requests: Sequence[Request], arrived: Arrived) -> None:
        self._requests, self._waiting, self._arrived = requests, list(requests), arrived
        self._open = {id(request): place for place, request in enumerate(requests)}
        self._completions: dict[int, Completion] = {}
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    def take(self, *, wait: bool = True, linger: float = 0.0) -> list[Request]:
        """Return all requests on the first call; later calls wait until all are answered; see :meth:`Exchange.take`."""
        del linger
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._waiting or not self._open or not wait)
            if self._failure is not None:
                raise self._failure
            requests, self._waiting = self._waiting, []
            return requests

    def give(self, request: Request, completion: Completion) -> None:
        """Store a completion and pass it to the callback.

        Raises:
            EngineError: If the request has a completion already.
        """
        with self._changed:
            place = self._open.pop(id(request), None)
            if place is None:
                raise EngineError(
                    f"expected one completion for each request, got a second one for sample {request.sample_id}"
                )
            self._completions[place] = completion
            self._arrived(place, completion)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make :meth:`take` raise an error; the first of several wins."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def completions(self) -> list[Completion]:
        """Return the completions in the order of the requests.

        Raises:
            EngineError: If some are missing.
        """
        if self._open:
            raise EngineError(f"expected {len(self._requests)} completions, got {len(self._completions)}")
        return [self._completions[place] for place in range(len(self._requests))]
