"""Engine and trainer compared module by module, with vLLM as the engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kit.vllm_models import FAMILIES, a_model, prompts_of, weights_of

from lightning_rl.generation import VLLMEngine
from lightning_rl.generation.engine_comparison import DISTRIBUTION, Consistency, compare
from lightning_rl.policy import PolicyModel

FAULTS = {  # stale tensor: module
    "model.embed_tokens.weight": "model.embed_tokens",
    "model.layers.1.self_attn.k_proj.weight": "model.layers.1.self_attn.qkv_proj",
    "model.layers.0.self_attn.o_proj.weight": "model.layers.0.self_attn.o_proj",
    "model.layers.1.post_attention_layernorm.weight": "model.layers.1.post_attention_layernorm",
    "model.layers.1.mlp.up_proj.weight": "model.layers.1.mlp.gate_up_proj",
    "model.layers.0.mlp.down_proj.weight": "model.layers.0.mlp.down_proj",
    "model.norm.weight": "model.norm",
    "lm_head.weight": "lm_head",
}


@contextmanager
def started(name: str, **options: Any) -> Iterator[tuple[PolicyModel, VLLMEngine]]:
    policy = PolicyModel(a_model(name), None, temperature=1.0, packed=True)
    engine = VLLMEngine(canary=None, max_model_len=64, **options)
    engine.select_extras(DISTRIBUTION)
    engine.start(policy.model, None, device=policy.model.device, dtype=torch.float32)
    try:
        engine.expect(weights_of(policy.model))
        engine.load_weights(weights_of(policy.model), version=0)
        yield policy, engine
    finally:
        engine.close()


def compared(policy: PolicyModel, engine: VLLMEngine, **options: Any) -> Consistency:
    return compare(policy, engine, prompts_of(5, 20), new_tokens=6, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_differences_of_equal_weights_are_rounding(name: str) -> None:
    with started(name) as sides:
        found = compared(*sides)
    assert found.module is not None and found.rounded
    assert found.largest < 1e-4 and found.largest_kl is not None and found.largest_kl < 1e-5


def test_the_module_of_a_fault_is_found() -> None:
    with started("qwen2") as (policy, engine):
        for version, (stale, module) in enumerate(FAULTS.items(), 1):
            tensors = ((key, weight * (1.05 if key == stale else 1.0)) for key, weight in weights_of(policy.model))
            engine.load_weights(tensors, version)
            found = compared(policy, engine)
            assert (found.module, found.rounded) == (module, False)
        engine.load_weights(weights_of(policy.model), len(FAULTS) + 1)
        engine._llm.apply_model(scale_attention)  # noqa: SLF001
        for cached in (True, False):
            found = compared(policy, engine, cached=cached)
            assert (found.module, found.rounded) == ("model.layers.1.self_attn", False)


def scale_attention(model: Any) -> None:
    model.model.layers[1].self_attn.attn.impl.scale *= 1.5


def test_a_prefill_in_chunks_agrees() -> None:
    chunks = {"enable_chunked_prefill": True, "max_num_batched_tokens": 20, "max_num_seqs": 8}
    with started("qwen2", **chunks) as sides:
        found = compared(*sides, cached=False, rows=1)
    assert found.rounded and found.largest < 1e-4
