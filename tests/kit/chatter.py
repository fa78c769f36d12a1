"""A policy that plays games at random: it draws one of some actions for every prompt."""

import math
import random
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from environments.templates import close_of, tokenizer_of
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from kit.support import tiny_module
from lightning_rl import PromptDataModule, RLLightningModule

FAMILY = "qwen2.5"
WIDTH = 512  # one dimension for each token
UNLIKELY = -12.0  # the logit of a token that stands behind another in no action


def chat_tokenizer() -> PreTrainedTokenizerBase:
    """Bytes and a few words, in ChatML."""
    return tokenizer_of(FAMILY)


@cache
def chatter(actions: tuple[str, ...]) -> Qwen2ForCausalLM:
    """A policy for which the last token alone says which come next: those that follow it in some action.

    Args:
        actions: what it says in a turn; it may begin one and end another.
    """
    tokenizer, (end,) = chat_tokenizer(), close_of(FAMILY)
    (*_, begin) = tokenizer("assistant\n", add_special_tokens=False)["input_ids"]
    table = torch.full((len(tokenizer), WIDTH), UNLIKELY)
    for action in actions:
        ids = tokenizer(action, add_special_tokens=False)["input_ids"]
        for last, following in pairwise([begin, *ids, end]):
            table[following, last] = following % 7 / 4  # no two actions are as likely as each other
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    config = Qwen2Config(**shape, eos_token_id=end, bos_token_id=None)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = Qwen2ForCausalLM(config)
    with torch.no_grad():
        layer: Any = policy.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        policy.model.embed_tokens.weight.copy_(torch.eye(WIDTH)[: len(tokenizer)])
        policy.lm_head.weight.copy_(table / math.sqrt(WIDTH))  # the norm stretches a unit vector to that length
    return policy


def chatting_module(actions: Sequence[str], **options: Any) -> RLLightningModule:
    """A module around a fresh copy of :func:`chatter`; every option can be replaced."""
    defaults: dict[str, Any] = {
        "policy": lambda: _copy(tuple(actions)),
        "tokenizer": chat_tokenizer(),
        "max_new_tokens": 96,
    }
    if {"environment", "tools"} & options.keys():
        defaults |= {"max_turns": 4, "max_turn_tokens": 24}
    return tiny_module(**{**defaults, **options})


def _copy(actions: tuple[str, ...]) -> Qwen2ForCausalLM:
    original = chatter(actions)
    copied = Qwen2ForCausalLM(original.config)
    copied.load_state_dict(original.state_dict())
    return copied


def generator_states() -> tuple[Any, ...]:
    """Of Python, NumPy and torch."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    torch_state = torch.default_generator.get_state().numpy().tobytes()
    return random.getstate(), (kind, keys.tobytes(), *rest), torch_state  # pyrefly: ignore[missing-attribute]


def games(number: int = 4, per_rollout: int = 2) -> PromptDataModule:
    """Rows whose prompt the environment's opening replaces."""
    return PromptDataModule([{"prompt": "play"}] * number, per_rollout, shuffle=False, chat=True)
