"""Selectively checkpointed layers whose kept results are changed in place later in the forward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from kit.support import differing, fit, tiny_model, tiny_module, tiny_policy, tiny_prompts
from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from lightning_rl.policy import activation_checkpointing
from lightning_rl.policy.activation_checkpointing import Checkpointing, checkpoint_layers

Change = Callable[[PreTrainedModel], RemovableHandle | None]


def scale(model: PreTrainedModel) -> RemovableHandle:
    """Scale the results of one product in place."""
    projection = model.get_submodule("model.layers.1.mlp.up_proj")
    return projection.register_forward_hook(lambda _module, _inputs, output: output.mul_(1.1))


def add_row(model: PreTrainedModel) -> RemovableHandle:
    """Write to a view of the results of one product."""

    def write(_module: Module, _inputs: object, output: Tensor) -> None:
        output[:, 0].add_(1.0)

    return model.get_submodule("model.layers.1.self_attn.o_proj").register_forward_hook(write)


def gradients(family: str, change: Change, mode: Checkpointing | None, **options: Any) -> dict[str, Tensor]:
    model = tiny_model(family, **options).train()
    change(model)
    checkpoint_layers(model, mode)
    ids = torch.arange(14).view(2, 7) % 13 + 2
    model(input_ids=ids, use_cache=False).logits.square().sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(
    ("family", "change"),
    [("qwen2", scale), ("llama", add_row), ("gpt_oss", lambda _: None)],
    ids=["scaled", "view", "experts"],
)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_are_those_without_checkpointing(family: str, change: Change, mode: Checkpointing) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "dtype": torch.float32}
    options = experts if family == "gpt_oss" else {}
    expected, found = (gradients(family, change, each, **options) for each in (None, mode))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_bitwise_products_of_many_tokens_are_checkpointed() -> None:
    modules = [
        tiny_module(policy=partial(tiny_policy, hidden_size=128), consistency="bitwise", activation_checkpointing=mode)
        for mode in (False, "selective")
    ]
    for module in modules:
        fit(module, data=tiny_prompts(32, 32), max_steps=1)
    assert differing(*modules) == []


def test_an_operation_of_higher_order_has_no_schema_and_is_recomputed() -> None:
    operation = torch.ops.higher_order.flex_attention
    assert activation_checkpointing._keep(None, operation) is CheckpointPolicy.PREFER_RECOMPUTE  # noqa: SLF001
