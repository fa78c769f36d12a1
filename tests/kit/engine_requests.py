"""Engines that are started without a module, and requests from plain options."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from lightning_rl import SamplingParams
from lightning_rl.generation import Completion, Engine, Request


def launch(engine: Engine, model: PreTrainedModel, tokenizer: Any = None) -> None:
    """Start an engine on the device and in the dtype of a model."""
    engine.start(model, tokenizer, device=model.device, dtype=model.dtype)


def request_of(prefix_ids: Sequence[int], sample_id: int = 0, seed: int = 0, **options: Any) -> Request:
    """A request; ``options`` are those of SamplingParams, with no EOS ids unless they are given."""
    sampling = SamplingParams(**dict[str, Any](eos_token_ids=()) | options)
    return Request(prefix_ids=tuple(prefix_ids), sample_id=sample_id, seed=seed, sampling=sampling)


def with_sampling(request: Request, **options: Any) -> Request:
    """The same request, drawn in another way."""
    return replace(request, sampling=replace(request.sampling, **options))


class RequestList:
    """Exchange over a fixed list of requests.

    Args:
        requests: Requests with different sample ids.
        answered: Function to call after each completion.
    """

    def __init__(self, requests: Sequence[Request], answered: Callable[[], object] = lambda: None) -> None:
        self.completions: dict[int, Completion] = {}  # by sample id, in the order of arrival
        self._number, self._waiting, self._answered = len(requests), list(requests), answered
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def take(self, *, wait: bool = True, linger: float = 0.0) -> list[Request]:
        """Return all requests, later an empty list after the last completion."""
        del linger
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or self._waiting or len(self.completions) == self._number or not wait
            )
            if self._error is not None:
                raise self._error
            requests, self._waiting = self._waiting, []
            return requests

    def give(self, request: Request, completion: Completion) -> None:
        """Store a completion."""
        with self._changed:
            assert request.sample_id not in self.completions
            self.completions[request.sample_id] = completion
            self._answered()
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make :meth:`take` raise an error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
