"""Following a trail: a task of several turns, its environment, tokenizer and a policy that gives up too early.

A prompt is ``c 4 >``: a place, and how many steps to go. ``look c ;`` is answered by the next place, which only the
environment knows; ``answer h <eos>`` ends the conversation. The reward is 1 for the place after exactly that many
steps, which takes as many questions. The policy was warm-started on demonstrations that mostly give up after two steps:
greedily it is right about short trails, and it samples right answers often enough to learn from.
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

from lightning_rl import Finish
from lightning_rl.data import PromptDataset
from lightning_rl.environments import TokenStep

PLACES, STEPS = "abcdefghijkl", range(2, 6)
WORDS = ("<pad>", "<eos>", ">", ";", "look", "answer", *PLACES, *map(str, STEPS), "<unused>")
IDS = {word: index for index, word in enumerate(WORDS)}
ENDS = (IDS[";"], IDS["<eos>"])  # of a turn

HELD_OUT_SEED = 10_000
WARM_START_SEED = 20_000
WARM_START_STEPS, WARM_START_TRAILS = 180, 96
GIVING_UP = 0.7  # of the demonstrations, after two steps


class Trail:
    """Twelve places in a circle, in an order of their own for each row."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        """Begins with the row's own prompt."""
        del seed
        self.following = dict(zip(row["circle"], row["circle"][1:] + row["circle"][:1], strict=True))
        self.goal = str(row["goal"])
        return ()

    def step(self, token_ids: Sequence[int], finish: Finish) -> TokenStep:
        """Says what lies behind a place, or whether an answer is right; ends whatever is neither."""
        said = [WORDS[token] for token in token_ids]
        if finish == Finish.STOP and len(said) == 3 and said[0] == "look" and said[2] == ";" and said[1] in PLACES:
            return TokenStep(token_ids=[IDS[self.following[said[1]]]])
        return TokenStep(done=True, reward=float(said == ["answer", self.goal, "<eos>"]))

    def close(self) -> None:
        """Holds nothing."""


def new_trail() -> Trail:
    """A :class:`Trail`, for configuration files, which name no class here."""
    return Trail()


def trails(count: int, *, seed: int, exclude: Iterable[Mapping[str, str]] = ()) -> list[dict[str, str]]:
    """``count`` rows with a prompt, the circle that it stands in, and the place that is asked for.

    Args:
        count: how many to draw.
        seed: of this function's own generator.
        exclude: rows that are never drawn, such as :func:`held_out_trails`.
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
    """:func:`held_out_trails`, for configuration files."""

    def __init__(self, count: int = 256) -> None:
        super().__init__(held_out_trails(count))


class Trails(PromptDataset):
    """:func:`trails` that are not held out, for configuration files."""

    def __init__(self, count: int, seed: int) -> None:
        super().__init__(trails(count, seed=seed, exclude=held_out_trails()))


def held_out_trails(count: int = 256) -> list[dict[str, str]]:
    """``count`` trails, the same on every call."""
    return trails(count, seed=HELD_OUT_SEED)


def trail_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer of the task: one id per word, 23 ids, no BOS; a word it does not know is an error."""
    tokenizer = Tokenizer(WordLevel(IDS))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left", unk_token=None
    )


def demonstration(row: Mapping[str, str], *, gives_up: bool) -> tuple[list[int], list[bool]]:
    """Ids of a whole conversation, and which of them the policy says."""
    circle, goal = row["circle"], row["goal"]
    steps = 2 if gives_up else circle.index(goal)
    words, own = row["prompt"].split(), [False] * 3
    for place, following in pairwise(circle[: steps + 1]):
        words, own = [*words, "look", place, ";", following], [*own, True, True, True, False]
    words, own = [*words, "answer", circle[steps], "<eos>"], [*own, True, True, True]
    return [IDS[word] for word in words], own


def untrained_policy(seed: int) -> Qwen2ForCausalLM:
    """A randomly initialised Qwen2 of 0.9 million parameters; the caller's random generators are left as they were."""
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
    """A copy of :func:`warm_started`, which a process computes once."""
    return copy.deepcopy(warm_started(seed, steps))


@cache
def warm_started(seed: int, steps: int) -> Qwen2ForCausalLM:
    """A small policy that follows a trail for two steps and then mostly gives up, in about 40 CPU seconds.

    Loss: mean negative log-likelihood of the policy's own words; what the environment says is not learnt.

    Args:
        seed: of the weights, the trails and who gives up.
        steps: of the optimizer; fewer of them leave it less able.
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
    logits = policy(input_ids=ids[:, :-1], use_cache=False).logits  # right padding: no token sees any
    losses = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    mask = own[:, 1:].flatten()
    return losses[mask].mean()
