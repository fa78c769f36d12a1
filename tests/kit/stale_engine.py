"""An engine that keeps drawing with old weights, and says that they are new."""

import copy
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from lightning_rl import TransformersEngine
from lightning_rl.generation import Completion, Request


class StaleEngine(TransformersEngine):
    """Draws with the weights that it was first given from a version on, and scores the canary with those it should.

    Args:
        since: the first version that it does not draw with.
    """

    def __init__(self, since: int) -> None:
        super().__init__()
        self.since = since
        self._old: Any = None

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        model = self._model
        self._old = self._old or copy.deepcopy(model)
        self._model = self._old if self.version >= self.since else model
        drawn = super().generate_batch(requests, logprobs=logprobs)
        self._model = model
        return drawn
