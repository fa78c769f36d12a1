"""Arrivals: the answers to requests one by one, so that something may begin with each before the others are there."""

import threading
from collections.abc import Callable, Sequence

from lightning_rl.generation import Completion, EngineError, Request

Arrived = Callable[[int, Completion], None]
"""Called with the place of a request and its answer, for one answer at a time, in any order."""


class Arrivals:
    """Requests that are all known from the start, as an :class:`~lightning_rl.generation.engine.Exchange`.

    An engine that draws all of them at once gives them all at its end.

    Args:
        requests: to be drawn.
        arrived: is told of each answer, in the thread of the engine that has it.
    """

    def __init__(self, requests: Sequence[Request], arrived: Arrived) -> None:
        self._requests, self._waiting, self._arrived = requests, list(requests), arrived
        self._open = {id(request): place for place, request in enumerate(requests)}
        self._completions: dict[int, Completion] = {}
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    def take(self, *, wait: bool = True, linger: float = 0.0) -> list[Request]:
        """All requests, once; then none, when all have been answered; see :meth:`Exchange.take`."""
        del linger
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._waiting or not self._open or not wait)
            if self._failure is not None:
                raise self._failure
            requests, self._waiting = self._waiting, []
            return requests

    def give(self, request: Request, completion: Completion) -> None:
        """Takes an answer and tells of it.

        Raises:
            EngineError: if the request has been answered already.
        """
        with self._changed:
            place = self._open.pop(id(request), None)
            if place is None:
                raise EngineError(
                    f"expected one answer to each request, got a further one to sample {request.sample_id}"
                )
            self._completions[place] = completion
            self._arrived(place, completion)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Has :meth:`take` raise an error, the first one of several."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def completions(self) -> list[Completion]:
        """The answers, in the order of the requests.

        Raises:
            EngineError: if some are missing.
        """
        if self._open:
            raise EngineError(f"expected {len(self._requests)} completions, got {len(self._completions)}")
        return [self._completions[place] for place in range(len(self._requests))]
