"""Cost of repeated prefills of conversations on the embedded engine, and bitwise comparison with a kept KV cache.

    python benchmarks/prefill.py

The embedded engine prefills the whole prefix of each turn. The table shows its share of CPU time for 64 conversations
of 8 turns, 8 per prompt, each turn with 8 sampled and 8 environment tokens, and for the trails of `recipes/agent.py`.
Below it: the number of rows with bitwise equal log-probabilities if the cache of the previous turn is reused.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from typing_extensions import override

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes"))

import trail_task

from lightning_rl import FinishReason, SamplingParams, TransformersEngine
from lightning_rl.environments import Conversation, ConversationLimits, TokenEnvironment, TokenStep, converse
from lightning_rl.generation import Request
from lightning_rl.generation.cache import cache_argument
from lightning_rl.samples import Prompt, Trajectory

PREFIXES, ROWS, PROMPTS, TURNS, TOKENS, RUNS = (64, 128, 256, 512), 64, 8, 8, 8, 3


class Saying(TokenEnvironment):
    """Return the scripted number of tokens in every turn."""

    @override
    def reset(self, row: Any, seed: int) -> Sequence[int]:
        """Begin with the row's own prompt."""
        return ()

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        """Report the same each time."""
        return TokenStep(token_ids=[6] * TOKENS)

    @override
    def close(self) -> None:
        """Hold nothing."""


@contextmanager
def reading(model: PreTrainedModel) -> Iterator[list[float]]:
    """Gathers the CPU seconds of each forward over more than one token a row."""
    seconds, begun = list[float](), [0.0]

    def begin(*_: Any) -> None:
        begun[0] = time.process_time()

    def end(*call: Any) -> None:
        options: dict[str, Any] = call[2]
        if options["input_ids"].shape[1] > 1:
            seconds.append(time.process_time() - begun[0])

    hooks = model.register_forward_pre_hook(begin, with_kwargs=True), model.register_forward_hook(end, with_kwargs=True)
    yield seconds
    for hook in hooks:
        hook.remove()


def openings(length: int) -> list[Conversation]:
    """Conversations with prompts of a length."""
    draw = torch.Generator().manual_seed(length)
    prompts = torch.randint(2, len(trail_task.WORDS), (PROMPTS, length), generator=draw).tolist()
    sampling = SamplingParams(max_new_tokens=TURNS * TOKENS, eos_token_ids=())
    prefixes = [tuple(prompts[number * PROMPTS // ROWS]) for number in range(ROWS)]
    firsts = [Request(prefix_ids=ids, sample_id=n, seed=n, sampling=sampling) for n, ids in enumerate(prefixes)]
    limits = ConversationLimits(turns=TURNS, turn_tokens=TOKENS)
    samples = [Trajectory(prompt=Prompt(0, first.prefix_ids, "", {}), request=first) for first in firsts]
    return [Conversation(Saying(), sample, limits) for sample in samples]


def trails() -> list[Conversation]:
    """Return a rollout of the recipe."""
    sampling = SamplingParams(max_new_tokens=40, eos_token_ids=trail_task.ENDS)
    made: list[Conversation] = []
    for number, row in enumerate(row for row in trail_task.trails(16, seed=0) for _ in range(16)):
        ids = tuple(trail_task.IDS[word] for word in row["prompt"].split())
        first = Request(prefix_ids=ids, sample_id=number, seed=number, sampling=sampling)
        columns = {name: value for name, value in row.items() if name != "prompt"}
        sample = Trajectory(prompt=Prompt(0, ids, row["prompt"], columns), request=first)
        made.append(Conversation(trail_task.Trail(), sample, ConversationLimits(turns=7, turn_tokens=6)))
    return made


def measure(name: str, model: PreTrainedModel, make: Any) -> None:
    """Print the median of a few runs."""
    engine = TransformersEngine(canary=False)
    engine.start(model, None, device=model.device, dtype=model.dtype)
    engine.load_weights(model.named_parameters(), 0)
    taken: list[tuple[float, float]] = []
    for _ in range(RUNS):
        talks, begin = make(), time.process_time()
        with reading(model) as seconds:
            converse(talks, engine, logprobs=True)
        taken.append((sum(seconds), time.process_time() - begin))
    read, whole = sorted(taken, key=lambda pair: pair[1])[RUNS // 2]
    print(f"  {name:<10}{whole:7.2f} s of CPU, {read:6.2f} s of it reading prefixes: {100 * read / whole:3.0f} %")


@torch.no_grad()
def bits(model: PreTrainedModel, length: int, rows: int = 16) -> tuple[int, float]:
    """Of how many rows a kept cache gives the same log-probabilities, and by how much they differ at most."""
    ids = torch.randint(2, len(trail_task.WORDS), (rows, length), generator=torch.Generator().manual_seed(0))
    kept, fresh = ({cache_argument(model): DynamicCache(config=model.config), "use_cache": True} for _ in range(2))
    last = 2 * TOKENS + 1  # what was drawn in the turn before, token by token, and what was said
    model(input_ids=ids[:, :-last], **kept)
    for place in range(length - last, length - TOKENS - 1):
        model(input_ids=ids[:, place : place + 1], **kept)
    behind = model(input_ids=ids[:, -TOKENS - 1 :], **kept).logits[:, -1].log_softmax(-1)
    whole = model(input_ids=ids, logits_to_keep=1, **fresh).logits[:, -1].log_softmax(-1)
    return int((behind == whole).all(-1).sum()), float((behind - whole).abs().max())


def main() -> None:
    """Print both."""
    torch.set_num_threads(1)
    model = trail_task.untrained_policy(0).eval()
    print(f"{ROWS} conversations of {TURNS} turns, {PROMPTS} prompts; one thread, float32, median of {RUNS} runs")
    for length in PREFIXES:
        measure(f"{length} tokens", model, lambda length=length: openings(length))
    measure("trails", trail_task.warm_started_policy(0).eval(), trails)
    for length in (64, 256):
        equal, difference = bits(model, length)
        print(
            f"  kept cache, {length} tokens: {equal} of 16 rows have the same bits, others differ by {difference:.0e}"
        )


if __name__ == "__main__":
    main()
