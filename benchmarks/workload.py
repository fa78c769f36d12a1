"""Workloads of benchmarks: models, prompts, rewards, response lengths; and a clock for phases.

Imports only torch and transformers, so that it runs in the environment of another trainer.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from addition import last_number_matches, sums
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

PAD, EOS, VOCABULARY, PROMPT = 0, 1, 16, 16
Lengths = Literal["equal", "geometric", "90/10", "sampled"]


class Size(NamedTuple):
    """Of a Qwen2."""

    width: int
    layers: int
    inner: int
    heads: int


SIZES = {
    "tiniest": Size(8, 1, 8, 1),
    "width 64": Size(64, 4, 192, 2),
    "1M": Size(128, 4, 384, 4),
    "width 256": Size(256, 4, 768, 4),
    "10M": Size(384, 5, 1152, 6),
}


def qwen2(size: Size, vocabulary: int = VOCABULARY) -> Qwen2Config:
    """Return the architecture of the quickstart at a size; with ``1M`` and 16 words it has 0.86 M parameters."""
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        intermediate_size=size.inner,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=PAD,
    )


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one word per id."""
    names = ["<pad>", "<eos>", *"abcdefghijklmn"]
    tokenizer = Tokenizer(WordLevel({name: place for place, name in enumerate(names)}))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token=None)


def prompt_texts(number: int) -> list[str]:
    """Prompts of 16 words."""
    ids = torch.randint(2, VOCABULARY, (number, PROMPT), generator=torch.Generator().manual_seed(0))
    return [" ".join("abcdefghijklmn"[place - 2] for place in row) for row in ids.tolist()]


def lengths_of(kind: Lengths, rows: int, longest: int) -> list[int]:
    """Of responses: all of the longest, geometric with half of it as mean, or nine short ones to a longest.

    None are given if the policy samples them.
    """
    draw = torch.Generator().manual_seed(0)
    if kind == "sampled":
        return []
    if kind == "equal":
        return [longest] * rows
    if kind == "geometric":
        return torch.empty(rows).geometric_(2 / longest, generator=draw).clamp_(1, longest).int().tolist()
    short = torch.randint(longest // 8, longest // 4 + 1, (rows,), generator=draw).tolist()
    return [longest if row % 10 == 9 else length for row, length in enumerate(short)]


def rewards_by_place(completions: Sequence[str], **_: Any) -> list[float]:
    """Wants the texts, and gives every group rewards that differ."""
    return [float(place % 2) for place, _ in enumerate(completions)]


class Workload(NamedTuple):
    """Model, data and rewards of both sides of a comparison."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rows: list[dict[str, Any]]
    rewards: Callable[..., list[float]]
    lengths: list[int]
    eos: int


def workload(
    *, size: str, lengths: Lengths, prompts: int, longest: int, group: int, rollouts: int, seed: int, **_: Any
) -> Workload:
    """Return the work of a cell: with random weights and words, or the model of a folder and sums."""
    script, number = lengths_of(lengths, prompts * group, longest), rollouts * prompts
    if size in SIZES:
        torch.manual_seed(0)
        model, rows = Qwen2ForCausalLM(qwen2(SIZES[size])), [{"prompt": text} for text in prompt_texts(number)]
        return Workload(model, words(), rows, rewards_by_place, script, EOS)
    model: Any = AutoModelForCausalLM.from_pretrained(size, dtype="float32")
    tokenizer: Any = AutoTokenizer.from_pretrained(size)
    rewards = rewards_by_place if script else last_number_matches
    return Workload(model, tokenizer, sums(number, seed=seed), rewards, script, tokenizer.eos_token_id)


class ScriptedLengths(LogitsProcessor):
    """Lets each row of ``generate`` end where it is told, and nowhere else.

    Args:
        lengths: of the responses, EOS included.
        prompt: tokens of every prompt, padding included.
        eos: token.
    """

    def __init__(self, lengths: Sequence[int], prompt: int = PROMPT, eos: int = EOS) -> None:
        self.lengths, self.prompt, self.eos = torch.tensor(lengths), prompt, eos

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Score of the next token."""
        ends = self.lengths == input_ids.shape[1] - self.prompt + 1
        scores = scores.masked_fill(ends[:, None], -torch.inf)
        scores[:, self.eos] = torch.where(ends, 0.0, -torch.inf)
        return scores


class Phases:
    """Wall-clock and CPU seconds of the phases of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Add what runs within to a phase."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            before = self.seconds.get(name, (0.0, 0.0))
            self.seconds[name] = before[0] + time.perf_counter() - wall, before[1] + time.process_time() - cpu

    def take(self) -> dict[str, tuple[float, float]]:
        """Return wall and CPU seconds per phase since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds
