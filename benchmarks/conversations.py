"""Seconds for conversations with slow tools on vLLM: continuous scheduling against lockstep.

    python benchmarks/conversations.py

200 conversations of 8 turns, with a tool that sleeps for a random time of up to 200 ms after each. Answers have 8
tokens on average, 64 at most. Tools run concurrently in threads with every driver:

* lockstep: a turn of all conversations is sampled together, and the next one after the slowest tool;
* rounds: ready conversations are sampled together, late ones join the next round (the default of engines);
* continuous: no conversation waits for another (``VLLMEngine``).

The drivers alternate and medians are compared. They must sample the same tokens. Continuous scheduling must take at
most 0.6 of the time of lockstep. Scheduling affects the idle time of the engine and the number of its steps, but not
the work per token, which dominates on a CPU: the ratio depends on the machine.
"""

import math
import os
import random
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from typing_extensions import override

from lightning_rl import FinishReason, SamplingParams, VLLMEngine
from lightning_rl.environments import (
    Conversation,
    ConversationLimits,
    TokenEnvironment,
    TokenStep,
    converse,
)
from lightning_rl.generation import Engine, Request
from lightning_rl.generation.sessions import Sessions
from lightning_rl.samples import Prompt, Trajectory

CONVERSATIONS, TURNS, PROMPT, TURN_TOKENS, MEAN_TOKENS, REPLY, VOCABULARY = 200, 8, 16, 64, 8, 8, 512
SLEEP, RUNS, BOUND = 0.2, 5, 0.6
DRIVERS = ("lockstep", "rounds", "continuous")


class Sleeping(TokenEnvironment):
    """Answers with a few tokens, after a time that only its seed and the turn decide."""

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        """Begin with the row's own prompt."""
        del row
        self._random = random.Random(seed)
        return ()

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        """Continue without end."""
        del token_ids, finish
        time.sleep(self._random.uniform(0, SLEEP))
        return TokenStep(token_ids=[self._random.randrange(VOCABULARY) for _ in range(REPLY)])

    @override
    def close(self) -> None:
        """Hold nothing."""


class Driven(VLLMEngine):
    """Takes turns in one of several ways, and counts its steps and the seconds that it had nothing to draw."""

    driver, steps, waited = "continuous", 0, 0.0

    @override
    async def serve(self, sessions: Sessions, *, logprobs: bool) -> None:
        arrival, in_round = sessions.arrival, sessions.round

        async def timed(waiting: Coroutine[Any, Any, Any]) -> Any:
            begin = time.perf_counter()
            try:
                return await waiting
            finally:
                self.waited += time.perf_counter() - begin

        sessions.arrival = lambda: timed(arrival())  # of the benchmark alone
        sessions.round = lambda linger: timed(in_round(math.inf if self.driver == "lockstep" else linger))
        self.waited = 0.0
        if self.driver == "continuous":
            await super().serve(sessions, logprobs=logprobs)
        else:
            await Engine.serve(self, sessions, logprobs=logprobs)

    def count_steps(self) -> None:
        """Count from now on."""
        engine = self._llm.llm_engine
        step = engine.step

        def counted() -> Any:
            self.steps += 1
            return step()

        engine.step = counted  # of the benchmark's own engine


class Run(NamedTuple):
    """Measurements of one driver.

    Attributes:
        seconds: on the wall.
        work: of the CPU.
        waited: with nothing to draw.
        steps: of the engine.
    """

    seconds: float
    work: float
    waited: float
    steps: float


def a_model() -> PreTrainedModel:
    """Return a Llama of 1.7 M parameters in four layers, untrained."""
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


def the_conversations() -> list[Conversation]:
    """Return conversations with distinct prompts; one of :data:`MEAN_TOKENS` ids ends an answer."""
    draw = torch.Generator().manual_seed(1)
    sampling = SamplingParams(max_new_tokens=TURNS * TURN_TOKENS, eos_token_ids=range(VOCABULARY // MEAN_TOKENS))
    limits = ConversationLimits(turns=TURNS, turn_tokens=TURN_TOKENS)
    made: list[Conversation] = []
    for number, ids in enumerate(torch.randint(VOCABULARY, (CONVERSATIONS, PROMPT), generator=draw).tolist()):
        request = Request(prefix_ids=tuple(ids), sample_id=number, seed=number, sampling=sampling)
        sample = Trajectory(prompt=Prompt(number, request.prefix_ids, "", {}), request=request)
        made.append(Conversation(Sleeping(), sample, limits, seed=number))
    return made


def tokens_of(trajectories: Sequence[Trajectory]) -> list[tuple[int, ...]]:
    """Return the tokens of each conversation after its prompt."""
    return [tuple(chain.from_iterable(each.token_ids for each in one.segments)) for one in trajectories]


def run(engine: Driven, executor: ThreadPoolExecutor) -> tuple[Run, list[tuple[int, ...]]]:
    """Hold all conversations; what that took, and what was said."""
    made, steps, begin, work = the_conversations(), engine.steps, time.perf_counter(), time.process_time()
    trajectories = converse(made, engine, logprobs=True, executor=executor)
    seconds, work = time.perf_counter() - begin, time.process_time() - work
    return Run(seconds, work, engine.waited, engine.steps - steps), tokens_of(trajectories)


def main() -> int:
    """Print a table; 1 if the bound does not hold."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    torch.set_num_threads(1)
    model = a_model()
    engine = Driven(canary=False, max_num_seqs=CONVERSATIONS)
    engine.start(model, None, device=model.device, dtype=model.dtype)
    engine.expect(model.named_parameters())
    runs: dict[str, list[Run]] = {name: [] for name in DRIVERS}
    said: list[list[tuple[int, ...]]] = []
    with ThreadPoolExecutor(CONVERSATIONS) as executor:
        for version in range(RUNS + 1):  # the first of each warms up
            for name in DRIVERS:
                engine.load_weights(model.named_parameters(), version)  # empties the prefix cache
                if not version and name == DRIVERS[0]:
                    engine.count_steps()
                engine.driver = name
                taken, tokens = run(engine, executor)
                runs[name].append(taken)
                said.append(tokens)
    if any(tokens != said[0] for tokens in said):
        raise RuntimeError("expected the same tokens from every driver, got others")
    drawn = f"{sum(map(len, said[0]))} tokens behind {CONVERSATIONS} prompts"
    print(f"{drawn}, one CPU thread, float32, medians of {RUNS} runs")
    medians = {name: Run(*map(median, zip(*taken[1:], strict=True))) for name, taken in runs.items()}
    for name, each in medians.items():
        share = each.seconds / medians["lockstep"].seconds
        print(
            f"  {name:<12}{each.seconds:6.2f} s   {share:5.2f} x lockstep   CPU {each.work:5.2f} s   "
            f"waited {each.waited:5.2f} s   {each.steps:5.0f} steps   "
            f"({', '.join(f'{one.seconds:.2f}' for one in runs[name][1:])})"
        )
    return int(medians["continuous"].seconds > BOUND * medians["lockstep"].seconds)


if __name__ == "__main__":
    sys.exit(main())
