"""Building policy, critic, reference and tokenizer from a name, a path or a callable."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.policy.model import PolicyModel, check_dropout, check_scoring

ModelSource = str | Path | Callable[[], PreTrainedModel]
TokenizerSource = str | Path | PreTrainedTokenizerBase


def build_model(source: ModelSource) -> PreTrainedModel:
    """A causal language model, loaded in the default dtype (float32, or what a ``-true`` precision sets)."""
    if isinstance(source, str | Path):
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.get_default_dtype())
    return source()


def build_policy(policy: ModelSource, critic: ModelSource | None, *, temperature: float, packed: bool) -> PolicyModel:
    """Policy and critic, checked: no dropout, and our forward agrees with the model's own.

    Raises:
        ValueError: if either check fails; the message says what to change.
    """
    model = build_model(policy)
    backbone = None if critic is None else model if critic == "shared" else build_model(critic)
    check_dropout(model)
    built = PolicyModel(model, backbone, temperature=temperature, packed=packed)
    check_scoring(model, packed=packed)
    if backbone is not None and backbone is not model:
        check_dropout(backbone)
        check_scoring(backbone, packed=packed)
    return built.train()  # transformers checkpoints activations in train mode only; there is no dropout


def build_tokenizer(tokenizer: TokenizerSource | None, policy: ModelSource) -> PreTrainedTokenizerBase | None:
    """The tokenizer given, or the one that lies beside a policy given by name or path."""
    if tokenizer is None and isinstance(policy, str | Path):
        tokenizer = policy
    return AutoTokenizer.from_pretrained(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer


def eos_ids_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Every id that ends a response: the generation config's, which may be several, and the tokenizer's."""
    configured = None if model.generation_config is None else model.generation_config.eos_token_id
    found = set(configured if isinstance(configured, list) else [] if configured is None else [configured])
    if tokenizer is not None and isinstance(tokenizer.eos_token_id, int):
        found.add(tokenizer.eos_token_id)
    return frozenset(found)


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of all weights, equal exactly if they are."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
