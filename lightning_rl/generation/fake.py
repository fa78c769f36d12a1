"""Scripted engine for tests."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rl.generation.engine import Engine
from lightning_rl.rollout import FinishReason
from lightning_rl.samples import Completion, Request

Script = Callable[[Request], Completion | Sequence[int]]


class FakeEngine(Engine):
    """Engine that answers every request from a script and stores the requests.

    Args:
        script: Function from a request to a completion or to token ids. Ids that end with one of the request's EOS ids
            finish with ``STOP``, others with ``LENGTH``; each has the log-probability ``logprob``.
        logprob: Log-probability of scripted tokens.
        returns_logprobs: False for an engine that cannot return log-probabilities.
    """

    def __init__(self, script: Script, *, logprob: float = -1.0, returns_logprobs: bool = True) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, returns_logprobs=returns_logprobs, cuts_short=True)
        self.script, self.returns_logprobs = script, returns_logprobs
        self.logprob = logprob
        self.requests: list[Request] = []

    @override
    def load_stream(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        deque(weights, maxlen=0)

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        self.requests.extend(requests)
        completions: list[Completion] = []
        for request in requests:
            completion = self.script(request)
            if not isinstance(completion, Completion):
                ids = tuple(completion)
                finish = FinishReason.STOP if ids and ids[-1] in request.eos_token_ids else FinishReason.LENGTH
                scores = torch.full((len(ids),), self.logprob, dtype=torch.float32)
                completion = Completion(token_ids=ids, logprobs=scores, finish=finish, version=self.version)
            completions.append(completion if logprobs else replace(completion, logprobs=None))
        return completions
