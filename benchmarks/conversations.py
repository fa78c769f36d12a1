"""Seconds for conversations with slow tools on vLLM: continuous scheduling against lockstep.

    python benchmarks/conversations.py

200 conversations of 8 turns, in which a tool sleeps for a random time of up to 200 ms after each. Answers end by
themselves after 8 tokens in the mean, 64 at most. Tools run in threads, all at the same time, whatever the driver:

* lockstep: a turn of all conversations is drawn at once, and the next one when the slowest tool has answered;
* rounds: whoever is ready draws together, and who comes too late joins the next round (what engines without a way of
  their own do);
* continuous: no conversation waits for another (what ``VLLMEngine`` does).

They interleave, and the best of a few runs counts, which another load on the machine disturbs least. They draw the same
tokens, which is checked. The bound is for continuous scheduling, 0.6 of the time of lockstep. An engine that is never
free leaves nothing to save, and tools that are all of the work leave a fifth, because the slowest conversation waits
for its own tools. What is saved besides is the end of each turn, when lockstep draws a few long answers alone.
"""

import math
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from typing_extensions import override

from lightning_rl import Finish, Sampling, VLLMEngine
from lightning_rl.environments import Conversation, Limits, Opening, TokenEnvironment, TokenStep, Transcript, converse
from lightning_rl.generation import Engine, Request
from lightning_rl.generation.engine import Exchange, give_all

CONVERSATIONS, TURNS, PROMPT, TURN_TOKENS, MEAN_TOKENS, REPLY, VOCABULARY = 200, 8, 16, 64, 8, 8, 512
SLEEP, RUNS, BOUND = 0.2, 5, 0.6
DRIVERS = ("lockstep", "rounds", "continuous")


class Sleeping(TokenEnvironment):
    """Answers with a few tokens, after a time that only its seed and the turn decide."""

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        """Begins with the row's own prompt."""
        del row
        self._random = random.Random(seed)
        return ()

    @override
    def step(self, token_ids: Sequence[int], finish: Finish) -> TokenStep:
        """Goes on for ever."""
        del token_ids, finish
        time.sleep(self._random.uniform(0, SLEEP))
        return TokenStep(token_ids=[self._random.randrange(VOCABULARY) for _ in range(REPLY)])

    @override
    def close(self) -> None:
        """Holds nothing."""


class Driven(VLLMEngine):
    """Takes turns in one of several ways."""

    driver = "continuous"

    @override
    def _converse(self, exchange: Exchange, *, logprobs: bool) -> None:
        if self.driver == "continuous":
            super()._converse(exchange, logprobs=logprobs)
        elif self.driver == "rounds":
            Engine._converse(self, exchange, logprobs=logprobs)  # noqa: SLF001
        else:
            while requests := exchange.take(linger=math.inf):
                give_all(exchange, requests, self.generate(requests, logprobs=logprobs))


def a_model() -> PreTrainedModel:
    """A Llama of 1.7 M parameters in four layers, which nobody has trained."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=PROMPT + TURNS * (TURN_TOKENS + REPLY),
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def the_openings() -> list[Opening]:
    """Each with a prompt of its own; one of :data:`MEAN_TOKENS` ids ends an answer."""
    draw = torch.Generator().manual_seed(1)
    sampling = Sampling(max_new_tokens=TURNS * TURN_TOKENS, eos_token_ids=range(VOCABULARY // MEAN_TOKENS))
    limits = Limits(turns=TURNS, turn_tokens=TURN_TOKENS)
    openings: list[Opening] = []
    for number, ids in enumerate(torch.randint(VOCABULARY, (CONVERSATIONS, PROMPT), generator=draw).tolist()):
        request = Request(prefix_ids=tuple(ids), sample_id=number, seed=number, sampling=sampling)
        openings.append(Opening(Conversation(Sleeping(), request, limits), {}, number))
    return openings


def tokens_of(transcripts: Sequence[Transcript]) -> list[tuple[int, ...]]:
    """What was said in each conversation, behind its prompt."""
    return [transcript.row.response_ids for transcript in transcripts]


def seconds_of(engine: VLLMEngine, executor: ThreadPoolExecutor) -> tuple[float, float, list[tuple[int, ...]]]:
    """How long all conversations take, how long of it the CPU works for them, and what was said."""
    openings, begin, work = the_openings(), time.perf_counter(), time.process_time()
    transcripts = converse(openings, engine, logprobs=True, executor=executor)
    return time.perf_counter() - begin, time.process_time() - work, tokens_of(transcripts)


def main() -> int:
    """Prints a table; 1 if the bound does not hold."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    torch.set_num_threads(1)
    model = a_model()
    engine = Driven(canary=False, max_num_seqs=CONVERSATIONS)
    engine.start(model, None)
    engine.expect(model.named_parameters())
    taken: dict[str, list[float]] = {name: [] for name in DRIVERS}
    worked: dict[str, list[float]] = {name: [] for name in DRIVERS}
    said: list[list[tuple[int, ...]]] = []
    with ThreadPoolExecutor(CONVERSATIONS) as executor:
        for version in range(RUNS + 1):
            for name in DRIVERS:
                engine.load_weights(model.named_parameters(), version)  # empties the prefix cache
                engine.driver = name
                seconds, work, tokens = seconds_of(engine, executor)
                taken[name].append(seconds)
                worked[name].append(work)
                said.append(tokens)
    if any(tokens != said[0] for tokens in said):
        raise RuntimeError("expected the same tokens from every driver, got others")
    found = {name: min(seconds[1:]) for name, seconds in taken.items()}
    drawn = f"{sum(map(len, said[0]))} tokens behind {CONVERSATIONS} prompts"
    print(f"{drawn}, one CPU thread, float32, best of {RUNS} runs")
    for name, seconds in found.items():
        each = ", ".join(f"{one:.2f}" for one in taken[name][1:])
        work = min(worked[name][1:])
        share = seconds / found["lockstep"]
        print(f"  {name:<12}{seconds:6.2f} s   {share:5.2f} x lockstep   CPU {work:5.2f} s   ({each})")
    return int(found["continuous"] > BOUND * found["lockstep"])


if __name__ == "__main__":
    sys.exit(main())
