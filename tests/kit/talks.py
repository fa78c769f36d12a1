"""Conversations for engines with vLLM's CPU kernels: every driver has to draw the same in them."""

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from kit.conversations import Talk, response_of, wanted
from kit.vllm_models import prompts_of
from lightning_rl import FinishReason, SamplingParams
from lightning_rl.environments import Conversation, ConversationLimits, TokenStep
from lightning_rl.generation import Request
from lightning_rl.samples import Trajectory

TURNS = 6
What = list[tuple[tuple[int, ...], FinishReason, list[list[float]]]]


class Echo(Talk):
    """Return tokens that depend on seed and turn, after a pause."""

    def __init__(self, heard: list[int] | None = None, pause: float = 0.0) -> None:
        self.heard, self.pause = heard, pause

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        """Begins with the row's own prompt."""
        self.seed = seed
        return ()

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        """Never end a conversation."""
        time.sleep(random.SystemRandom().random() * self.pause)
        if self.heard is not None:
            self.heard.append(self.seed)
        return TokenStep(token_ids=[2 + (self.seed + sum(token_ids)) % 100, 5])


def openings(number: int = 16, *, pause: float = 0.0, **options: Any) -> list[Conversation]:
    """Conversations of :data:`TURNS` turns of up to 16 tokens; ``options`` are those of SamplingParams."""
    known: dict[str, Any] = {"max_new_tokens": 100, "temperature": 1.0, "eos_token_ids": range(1, 12), **options}
    return [
        Conversation(
            Echo(pause=pause),
            wanted(Request(prefix_ids=tuple(ids), sample_id=n, seed=1000 + n, sampling=SamplingParams(**known))),
            ConversationLimits(turns=TURNS, turn_tokens=16, length=256),
            seed=n,
        )
        for n, ids in enumerate(prompts_of(number, 60))
    ]


def what_was_said(trajectories: Sequence[Trajectory]) -> What:
    """Everything that a driver could change: ids, ends, log-probabilities."""
    return [
        (
            response_of(each),
            each.finish,
            [segment.logprobs.tolist() for segment in each.segments if segment.logprobs is not None],
        )
        for each in trajectories
    ]
