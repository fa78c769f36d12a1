"""Generation contains no collective: under sharding a rank finishes however far the other ranks are."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.engine_requests import with_sampling
from kit.ranks import STRATEGIES, run_ranks
from kit.support import EOS, fit, tiny_module, tiny_policy, tiny_prompts
from typing_extensions import override

from lightning_rl import FinishReason, TransformersEngine
from lightning_rl.generation import Completion, Request

PATIENCE = 60.0  # seconds; below the timeout of the collectives
SHORT, LONG = 3, 100
OTHER = EOS + 1


class OneAfterTheOther(TransformersEngine):
    """Draws 3 tokens on one rank and 100 on the other, and never on both at once: while a rank draws, the other is
    either not yet or no longer there. A collective within generation would wait in vain.

    Args:
        folder: where a rank leaves word that it is done.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.rollouts, self.lengths = folder, 0, list[int]()

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        if requests[0].sampling.max_new_tokens != LONG:  # the canary's
            return super().generate_batch(requests, logprobs=logprobs)
        self.rollouts += 1
        first = dist.get_rank() == self.rollouts % 2  # the long one begins, then the short one
        length = LONG if dist.get_rank() == 1 else SHORT
        cut = [with_sampling(request, max_new_tokens=length, eos_token_ids=()) for request in requests]
        with self.turn(waits=not first):
            completions = super().generate_batch(cut, logprobs=logprobs)
        self.lengths += [len(completion.token_ids) for completion in completions]
        return [replace(completion, **self.ending(completion.token_ids)) for completion in completions]

    @staticmethod
    def ending(drawn: Sequence[int]) -> dict[str, Any]:
        """As many tokens, of which the last one ends the response if it is a short one, and no other one does."""
        *body, last = (OTHER if token == EOS else token for token in drawn)
        if len(drawn) == LONG:
            return {"token_ids": (*body, last), "finish": FinishReason.LENGTH}
        return {"token_ids": (*body, EOS), "finish": FinishReason.STOP}

    @contextmanager
    def turn(self, *, waits: bool) -> Iterator[None]:
        """Around what may only happen before or after the other rank does the same."""
        done, end = self.folder / str(self.rollouts), time.monotonic() + PATIENCE
        while waits and not done.exists():
            assert time.monotonic() < end, "the other rank never finished its generation"
            time.sleep(0.01)
        yield
        if not waits:
            done.touch()


def run(folder: Path, strategy: str) -> None:
    """Two rollouts."""
    engine = OneAfterTheOther(folder)
    policy = partial(tiny_policy, max_position_embeddings=LONG + 8)
    module = tiny_module(policy=policy, engine=engine, max_new_tokens=LONG, group_size=2)
    fit(module, data=tiny_prompts(4, 2), strategy=STRATEGIES[strategy](), devices=2)
    assert engine.rollouts == 2 and engine.lengths == [LONG if dist.get_rank() == 1 else SHORT] * 4


@pytest.mark.nightly
@pytest.mark.parametrize("strategies", [("fsdp2", "zero3"), ("ddp", "fsdp1", "zero1", "zero2")], ids=len)
def test_ranks_with_3_and_100_tokens_both_finish(strategies: tuple[str, ...], tmp_path: Path) -> None:
    run_ranks(__file__, 2, tmp_path, *strategies, timeout=240)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in sys.argv[2:]:
        own = Path(sys.argv[1]) / each
        own.mkdir(exist_ok=True)
        run(own, each)
