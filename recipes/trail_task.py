"""Following a trail: a task of several turns, with its environment, tokenizer and warm-started policy.

A prompt is ``c 4 >``: a place and a number of steps. The environment answers ``look c ;`` with the next place; ``answer
h <eos>`` ends the conversation. The reward is 1 for the place after exactly that many steps. The policy is warm-started
on demonstrations that mostly stop after two steps: greedy decoding solves short trails, and samples are correct often
enough to learn from.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from lightning_rl import FinishReason
from lightning_rl.data import PromptDataset
from lightning_rl.environments import TokenStep

PLACES, STEPS = "abcdefghijkl", range(2, 6)
WORDS = ("<pad>", "<eos>", ">", ";", "look", "answer", *PLACES, *map(str, STEPS), "<unused>")
IDS = {word: index for index, word in enumerate(WORDS)}
ENDS = (IDS[";"], IDS["<eos>"])  # tokens that end a turn

HELD_OUT_SEED = 10_000
WARM_START_SEED = 20_000
WARM_START_STEPS, WARM_START_TRAILS = 180, 96
GIVING_UP = 0.7  # share of demonstrations that stop after two steps


class Trail:
    """Environment of twelve places in a circle, whose order differs between rows."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        """Start with the row's prompt."""
        del seed
        self.following = dict(zip(row["circle"], row["circle"][1:] + row["circle"][:1], strict=True))
        self.goal = str(row["goal"])
        return ()

    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        """Return the place after a place, or end the conversation with the reward of an answer."""
        words = [WORDS[token] for token in token_ids]
        if (
            finish == FinishReason.STOP
            and len(words) == 3
            and words[0] == "look"
            and words[2] == ";"
            and words[1] in PLACES
        ):
            return TokenStep(token_ids=[IDS[self.following[words[1]]]])
        return TokenStep(done=True, reward=float(words == ["answer", self.goal, "<eos>"]))

    def close(self) -> None:
        """Do nothing."""


def new_trail() -> Trail:
    """Return a :class:`Trail`; a function, because configuration files need one."""
    return Trail()


def trails(count: int, *, seed: int, exclude: Iterable[Mapping[str, str]] = ()) -> list[dict[str, str]]:
    """Sample ``count`` rows with a prompt, its circle, and the goal.

    Args:
        count: Number of rows.
        seed: Seed of a local generator.
        exclude: Rows to skip, such as :func:`held_out_trails`.
    """
    generator, excluded = Random(seed), {(row["prompt"], row["circle"]) for row in exclude}
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        circle = "".join(generator.sample(PLACES, len(PLACES)))
        steps = generator.choice(STEPS)
        row = {"prompt": f"{circle[0]} {steps} >", "circle": circle, "goal": circle[steps]}
        if (row["prompt"], circle) not in excluded:
            rows.append(row)
    return rows


class HeldOutTrails(PromptDataset):
    """Data set of :func:`held_out_trails`, for configuration files."""

    def __init__(self, count: int = 256) -> None:
        super().__init__(held_out_trails(count))


class Trails(PromptDataset):
    """Data set of :func:`trails` that are not held out, for configuration files."""

    def __init__(self, count: int, seed: int) -> None:
        super().__init__(trails(count, seed=seed, exclude=held_out_trails()))


def held_out_trails(count: int = 256) -> list[dict[str, str]]:
    """Return ``count`` trails, always the same."""
    return trails(count, seed=HELD_OUT_SEED)


def trail_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the task: one id per word, 23 ids, no BOS; an unknown word raises."""
    tokenizer = Tokenizer(WordLevel(IDS))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left", unk_token=None
    )


def demonstration(row: Mapping[str, str], *, gives_up: bool) -> tuple[list[int], list[bool]]:
    """Return the ids of a conversation, and a mask of those that the policy writes."""
    circle, goal = row["circle"], row["goal"]
    steps = 2 if gives_up else circle.index(goal)
    words, own = row["prompt"].split(), [False] * 3
    for place, following in pairwise(circle[: steps + 1]):
        words, own = [*words, "look", place, ";", following], [*own, True, True, True, False]
    words, own = [*words, "answer", circle[steps], "<eos>"], [*own, True, True, True]
    return [IDS[word] for word in words], own


def untrained_policy(seed: int) -> Qwen2ForCausalLM:
    """Return a randomly initialized Qwen2 of 0.9 million parameters; global random generators are unchanged."""
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=128,
        num_hidden_layers=4,
        intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=IDS["<eos>"],
        pad_token_id=IDS["<pad>"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def warm_started_policy(seed: int = 0, steps: int = WARM_START_STEPS) -> Qwen2ForCausalLM:
    """Return a copy of :func:`warm_started`, which is cached."""
    return copy.deepcopy(warm_started(seed, steps))


@cache
def warm_started(seed: int, steps: int) -> Qwen2ForCausalLM:
    """Return a small policy that follows a trail for two steps and then mostly stops, in about 40 CPU seconds.

    Loss: mean negative log-likelihood of the policy's tokens, without those of the environment.

    Args:
        seed: Seed of the weights, the trails and the demonstrations.
        steps: Number of optimizer steps.
    """
    policy, draw = untrained_policy(seed), Random(seed)
    optimizer = AdamW(policy.parameters(), lr=2e-3, weight_decay=0.0, fused=True)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10) * (1 - step / steps))
    rows = trails(steps * WARM_START_TRAILS, seed=WARM_START_SEED + seed, exclude=held_out_trails())
    for first in range(0, len(rows), WARM_START_TRAILS):
        shown = [
            demonstration(row, gives_up=draw.random() < GIVING_UP) for row in rows[first : first + WARM_START_TRAILS]
        ]
        ids = pad_sequence([torch.tensor(words) for words, _ in shown], batch_first=True)
        own = pad_sequence([torch.tensor(mask) for _, mask in shown], batch_first=True)
        optimizer.zero_grad()
        _own_loss(policy, ids, own).backward()
        clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return policy


def _own_loss(policy: Qwen2ForCausalLM, ids: Tensor, own: Tensor) -> Tensor:
    logits = policy(input_ids=ids[:, :-1], use_cache=False).logits  # right padding needs no attention mask
    losses = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    mask = own[:, 1:].flatten()
    return losses[mask].mean()
