"""Layers that tensor parallelism splits, and models that it refuses."""

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
import transformers
from kit.ranks import TIMEOUT, run_ranks
from kit.support import fit, tiny_model, tiny_module, tiny_policy, tiny_prompts
from lightning.pytorch.strategies import ModelParallelStrategy
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightning_rl import FakeEngine
from lightning_rl.distributed.tensor import check_plan
from lightning_rl.generation import Request


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The layers, without the head."""
    inner = model.base_model
    assert isinstance(inner, PreTrainedModel)
    return inner


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma3_text"])
def test_these_can_be_split(family: str) -> None:
    if family == "gemma3_text" and Version(transformers.__version__) < Version("5.21"):
        pytest.skip("the plan of older transformers splits its embedding, and is refused by name")
    check_plan(backbone(tiny_model(family)), 2)


def without_plan() -> PreTrainedModel:
    """GPT-2, for which transformers has no plan."""
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=4, vocab_size=16)
    return AutoModelForCausalLM.from_config(config)


def with_dora() -> PreTrainedModel:
    """Adapters whose scale needs the norm of whole rows."""
    model: Any = get_peft_model(tiny_policy(), LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    return model.base_model.model


@pytest.mark.parametrize(
    ("model", "ranks", "obstacle"),
    [
        (without_plan, 2, "GPT2Model: it has no plan in config.base_model_tp_plan"),
        (partial(tiny_model, "qwen3_moe"), 2, "Qwen3MoeModel: its plan asks for moe_tp_experts"),
        (partial(tiny_model, "llama"), 4, "LlamaModel: 4 ranks do not divide num_key_value_heads=2"),
        (partial(tiny_model, "llama", intermediate_size=63), 2, "2 ranks do not divide intermediate_size=63"),
        (with_dora, 2, "it has adapters with DoRA"),
    ],
)
def test_a_model_that_would_be_split_wrongly_is_refused(model: Any, ranks: int, obstacle: str) -> None:
    with pytest.raises(ValueError, match=obstacle) as refused:
        check_plan(backbone(model()), ranks)
    assert str(refused.value).endswith('use "fsdp2"')


@pytest.mark.nightly
def test_lightnings_default_splits_the_layers_of_a_node() -> None:
    run_ranks(__file__, 2)


def answer(request: Request) -> list[int]:
    """Some tokens, then EOS."""
    return [2 + request.sample_id % 5, 3, 1]


def rank() -> None:
    """One of two ranks that hold half of every matrix of a layer, all of the rest, and train on the same rows."""
    engine = FakeEngine(answer)
    strategy = ModelParallelStrategy(process_group_backend="gloo", timeout=TIMEOUT)
    module = tiny_module(engine=engine)
    fit(module, data=tiny_prompts(4, 4), strategy=strategy, devices=2)
    assert module.policy is not None
    shares: dict[str, int] = {}
    for name, parameter in module.policy.named_parameters():
        assert isinstance(parameter, DTensor)
        shares[name] = parameter.numel() // parameter.to_local().numel()
    matrices = {name for name in shares if name.endswith("_proj.weight")}
    biases = {name for name in shares if name.endswith("_proj.bias")}  # of queries, keys and values
    assert len(matrices) == 7 * 2 and len(biases) == 3 * 2
    assert {name for name, share in shares.items() if share == 2} == matrices | biases
    assert all(share in (1, 2) for share in shares.values())
    assert len(engine.requests) == (16 if dist.get_rank() == 0 else 0)  # one of them draws for both


if __name__ == "__main__":
    rank()
