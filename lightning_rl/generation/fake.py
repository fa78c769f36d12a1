"""FakeEngine: says what a script tells it to, for tests of everything around generation."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rl.generation.engine import Completion, Engine, Request
from lightning_rl.rollout import Finish

Script = Callable[[Request], Completion | Sequence[int]]


class FakeEngine(Engine):
    """Answers every request from a script and keeps what it was asked.

    Args:
        script: from a request to a completion, or to the token ids of one. Ids that end with one of the request's EOS
            ids finish with ``STOP``, others with ``LENGTH``, and each has the log-probability ``logprob``.
        logprob: log-probability of scripted tokens.
        returns_logprobs: False for an engine that cannot return log-probabilities.
    """

    def __init__(self, script: Script, *, logprob: float = -1.0, returns_logprobs: bool = True) -> None:
        super().__init__()
        self.script = script
        self.logprob = logprob
        self.returns_logprobs = returns_logprobs
        self.requests: list[Request] = []

    @override
    def start(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        pass

    @override
    def _take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _ in weights:
            pass

    @override
    def _draw(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        self.requests.extend(requests)
        return [self._completion(request, logprobs=logprobs) for request in requests]

    def _completion(self, request: Request, *, logprobs: bool) -> Completion:
        given = self.script(request)
        if not isinstance(given, Completion):
            ids = tuple(given)
            finish = Finish.STOP if ids and ids[-1] in request.eos_ids else Finish.LENGTH
            given = Completion(
                token_ids=ids, logprobs=torch.full((len(ids),), self.logprob), finish=finish, version=self.version
            )
        return given if logprobs else replace(given, logprobs=None)
