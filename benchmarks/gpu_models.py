"""Models and prompts of `gpu_smoke.py`, and what their passes cost on paper."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from addition import sums
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from lightning_rl import Rollout


class Shape(NamedTuple):
    """Of a Qwen2."""

    width: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    tied: bool


SHAPES = {
    "tiny": Shape(128, 256, 2, 4, 2, 512, tied=True),
    "0.5B": Shape(896, 4864, 24, 14, 2, 151_936, tied=True),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151_936, tied=True),
    "7B": Shape(3584, 18_944, 28, 28, 4, 152_064, tied=False),
}

DENSE_PEAK = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12}
"""FLOP a second of bfloat16 without sparsity, as data sheets say."""

CONVENTIONS = ("causal attention", "full attention")
"""Attention scores that an MFU counts: half of them, as a causal kernel computes, or all, as 6 N + 12 L h T does."""


def random_model(
    name: str, device: str, dtype: torch.dtype = torch.bfloat16, *, longest: int = 8192
) -> Qwen2ForCausalLM:
    """Return a model of a size on its device; its weights are large enough for a distribution far from uniform."""
    shape = SHAPES[name]
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=longest,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=1,
        architectures=["Qwen2ForCausalLM"],
    )
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def pretrained_model(folder: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of a folder on its device."""
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=dtype).to(device)


def random_prompts(number: int, length: int, vocabulary: int) -> list[list[int]]:
    """Return token ids of prompts."""
    draw = torch.Generator().manual_seed(1)
    return torch.randint(2, vocabulary, (number, length), generator=draw).tolist()


def chat_prompts(number: int, folder: str) -> list[list[int]]:
    """Return token ids of sums as chat prompts, for the tokenizer of a folder."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    options = {"add_generation_prompt": True, "return_dict": False}
    return [tokenizer.apply_chat_template(row["prompt"], **options) for row in sums(number, seed=0)]


def rows_of(lengths: Sequence[int], vocabulary: int, prompt: int) -> Rollout:
    """Rows of given lengths, prompt included, in pairs that are groups; each half of a pair has its own advantage."""
    ids = torch.randint(2, vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    parts = [part.tolist() for part in ids.split(list(lengths))]
    prompts, responses = [part[:prompt] for part in parts], [part[prompt:] for part in parts]
    rollout = Rollout.of_samples(prompts, responses, groups=[row // 2 for row in range(len(parts))])
    signs = torch.arange(len(parts)).remainder(2) * 2.0 - 1.0
    return rollout.replace(advantages=torch.where(rollout.valid_tokens, signs[:, None], 0.0))


def update_flops(name: str, lengths: Sequence[int], responses: Sequence[int], convention: str) -> float:
    """FLOP of forward and backward without recomputation; padding is not counted, the head on responses alone."""
    shape = SHAPES[name]
    attention = shape.width * shape.width * 2 + 2 * shape.width * shape.width * shape.key_heads // shape.heads
    matrices = shape.layers * (attention + 3 * shape.width * shape.inner)
    scores = sum(4 * shape.layers * shape.width * length * length for length in lengths)
    if convention == CONVENTIONS[0]:
        scores /= 2
    return 3.0 * (2 * matrices * sum(lengths) + scores + 2 * shape.vocabulary * shape.width * sum(responses))


def dense_peak(device: str) -> float | None:
    """FLOP a second of the data sheet, that an MFU is a share of; None for a device that is not in the table."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((peak for part, peak in DENSE_PEAK.items() if part in name), None)
