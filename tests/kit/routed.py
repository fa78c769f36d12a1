"""Shared code of tests of router replay: a mixture with close scores, and the mismatch of engine and trainer."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel

from kit.support import fit, recorder, tiny_model, tiny_module, tiny_prompts
from lightning_rl import RLCallback, Rollout


def many_experts(dtype: torch.dtype, family: str = "qwen3_moe") -> PreTrainedModel:
    """A mixture whose routers choose among many experts, so that scores lie close, or a dense model of its size."""
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 192,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "vocab_size": 151,
        "max_position_embeddings": 256,
        "initializer_range": 0.25,
    }
    if family == "qwen3_moe":
        sizes |= {"num_experts": 128, "moe_intermediate_size": 64}
    return tiny_model(family, dtype=dtype, **sizes)


def mismatch(policy: Any, callbacks: Sequence[RLCallback] = (), **options: Any) -> Tensor:
    """|engine - trainer| of every token of two rollouts, each before it is trained on."""
    seen: list[Rollout] = []
    module = tiny_module(
        policy=policy,
        minibatches_per_rollout=2,
        max_new_tokens=32,
        optimizer=partial(AdamW, lr=1e-4),
        **options,
    )
    fit(module, callbacks=[recorder(seen)("seen"), *callbacks], data=tiny_prompts(8, 4))
    found = [
        (rollout.require("rollout_logprobs") - rollout.require("old_logprobs"))[rollout.valid_tokens]
        for rollout in seen
    ]
    return torch.cat(found).abs()


def check_that_it_falls(off: Tensor, on: Tensor) -> None:
    """Holds what replay does to the mismatch against the bar: half of its mean, a fifth of its maximum."""
    found = f"mean {off.mean():.4f} to {on.mean():.4f}, maximum {off.max():.2f} to {on.max():.2f}"
    assert float(off.mean()) >= 2 * float(on.mean()) and float(off.max()) >= 5 * float(on.max()), found
    assert float(off.square().mean()) >= 10 * float(on.square().mean()), found  # twice kl/rollout, to second order
