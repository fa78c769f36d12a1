"""LoRA without merging: the adapter alone goes to vLLM, a new one for each version, and the canary watches it."""

from typing import Any

import pytest
import torch
from kit.engine_requests import launch
from kit.support import fit, tiny_module, tiny_prompts
from kit.vllm_models import a_model, prompts_of, requests_for, synced, worst
from kit.vllm_rank import Watch, an_engine
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from lightning_rl import RLLightningModule, VLLMEngine
from lightning_rl.callbacks import RolloutKL
from lightning_rl.generation.vllm import internals
from lightning_rl.policy.lora import base_model_of

TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def with_adapter(name: str = "qwen2", **options: Any) -> nn.Module:
    known: dict[str, Any] = {"r": 4, "lora_alpha": 12, "target_modules": TARGETS, **options}
    return get_peft_model(a_model(name), LoraConfig(**known))  # pyright: ignore[reportArgumentType]


def a_run() -> RLLightningModule:
    return tiny_module(
        policy=with_adapter,
        engine=an_engine(lora="adapter"),
        minibatches_per_rollout=2,
        temperature=0.8,
        max_new_tokens=12,
        eos_token_ids=[1, *range(20, 30)],
    )


def moved_adapter(model: PreTrainedModel, seed: int) -> None:
    """Every part of the adapter takes a random step."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=draw)


def start_engine(model: PreTrainedModel) -> VLLMEngine:
    engine = an_engine(lora="adapter", canary=None)
    launch(engine, model)
    engine.expect(model.named_parameters())
    return engine


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("qwen2", {}, id="untied"),
        pytest.param("qwen2-tied", {"rank_pattern": {"v_proj": 9}, "use_rslora": True}, id="tied-ranks-differ"),
    ],
)
def test_each_version_of_the_adapter_is_the_trainers_and_the_base_comes_once(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reloads, reload = [], internals.reload
    monkeypatch.setattr(internals, "reload", lambda *given: (reloads.append(1), reload(*given)))
    model = base_model_of(with_adapter(name, **options))
    engine, requests = start_engine(model), requests_for(prompts_of(8))
    for version in range(3):
        moved_adapter(model, version)
        if version:
            assert worst(model, requests, engine.generate(requests, logprobs=True)) > 1e-2, "stale"
        completions = synced(engine, model, version).generate(requests, logprobs=True)
        assert worst(model, requests, completions) < 1e-4
        assert engine.score([[4, 5, 6]])[0].shape == (2,)
    assert len(reloads) == 1
    engine.close()


def test_a_run_sends_adapters_and_the_canary_agrees() -> None:
    watch = Watch()
    fit(a_run(), callbacks=[watch, RolloutKL(0.1)], data=tiny_prompts(16, 4, validation=[[2, 3]]))
    assert len(watch.rollouts) == 4
    for rollout in watch.rollouts:
        difference = rollout.require("rollout_logprobs") - rollout.require("old_logprobs")
        assert float(difference[rollout.valid_tokens].abs().max()) < 1e-4
    assert watch.rows[0]["time/canary"] > 0


def test_a_policy_without_adapters_or_with_more_than_them_is_refused() -> None:
    with pytest.raises(ValueError, match=r'none in Qwen2ForCausalLM: use lora="merged"'):
        start_engine(a_model())
    model = base_model_of(with_adapter())
    model.get_input_embeddings().weight.requires_grad_()
    with pytest.raises(ValueError, match=r"got model\.embed_tokens\.weight that trains as well"):
        start_engine(model)
    with pytest.raises(ValueError, match='expected lora="merged" or "adapter", got \'both\''):
        an_engine(lora="both")
