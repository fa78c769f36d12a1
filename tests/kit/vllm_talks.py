"""Conversations on ranks that share one vLLM: ``vllm_talks.py FOLDER RANKS`` saves what was said on each."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from kit.conversations import Talk, response_of, turn_numbers_of, wanted
from kit.engine_requests import launch
from kit.vllm_models import VOCABULARY, a_model, prompts_of, synced
from kit.vllm_rank import an_engine
from lightning_rl import FinishReason, SamplingParams
from lightning_rl.environments import Conversation, ConversationLimits, TokenStep, converse
from lightning_rl.generation import Request
from lightning_rl.generation.validate_completions import Answers

NUMBER = 7


class Counting(Talk):
    """Ends after some turns, others for each sample."""

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        """Begins with the row's own prompt."""
        self.left = 1 + seed % 5
        return ()

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        """Says how many turns are left."""
        self.left -= 1
        return TokenStep(token_ids=[3 + self.left]) if self.left else TokenStep(done=True)


def opening(number: int, ids: Sequence[int]) -> Conversation:
    """One conversation."""
    sampling = SamplingParams(max_new_tokens=40, eos_token_ids=range(1, 12))
    first = Request(prefix_ids=tuple(ids), sample_id=number, seed=number, sampling=sampling)
    return Conversation(Counting(), wanted(first), ConversationLimits(turn_tokens=8, length=256), seed=number)


def main(folder: Path, ranks: int) -> None:
    """The last rank has one conversation at first and then none, the first all others; alone a rank has them all."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"]) if ranks > 1 else 0
    if ranks > 1:
        dist.init_process_group("gloo")
    model, engine = a_model(), an_engine(tensor_parallel_size=ranks, canary=False)
    launch(engine, model)
    engine.expect(model.named_parameters())
    synced(engine, model)
    every = list(enumerate(prompts_of(NUMBER, 30)))
    said: list[Any] = []
    for mine in (every, every) if ranks == 1 else (every[:-1], every) if rank == 0 else (every[-1:], []):
        answers = Answers(engine, logprobs=True, vocabulary=VOCABULARY)
        trajectories = converse([opening(*one) for one in mine], engine, logprobs=True, answers=answers)
        said.append([(response_of(each), turn_numbers_of(each), int(each.finish)) for each in trajectories])
    torch.save(said, folder / f"{ranks}-{rank}.pt")
    engine.close()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
