"""Tensor parallelism: the matrices of each layer split over ranks that work on the same rows.

What is split how is the model's own plan (``config.base_model_tp_plan`` of transformers). Queries, keys and values of
some heads, and some columns of the feed-forward, lie on each rank; embeddings, norms and the head on all of them.

Source: Shoeybi et al. 2019, arXiv:1909.08053.
"""

import re
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

SPLIT: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
PARTIAL = "replicated_with_grad_allreduce"  # whole on each rank, but used by its own heads alone


def split_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Splits every layer with a plan over the ranks of a mesh with one dimension.

    Raises:
        ValueError: if a model has no plan, or one that we do not know; the message says what to use instead.
    """
    for part in _backbones(model):
        check_plan(part, mesh.size())
        for module, style in _plan_entries(part):
            # with LoRA also the adapter's matrix that has the split side, B for columns
            adapters = getattr(module, "lora_B" if style == "colwise" else "lora_A", {}).values()
            for linear in (getattr(module, "base_layer", module), *adapters) if style in SPLIT else ():
                parallelize_module(linear, mesh, SPLIT[style]())


def check_plan(backbone: PreTrainedModel, size: int) -> None:
    """Refuses what would be split wrongly.

    Raises:
        ValueError: naming the model, what is in the way and the fix.
    """
    name, config = type(backbone).__name__, backbone.config.get_text_config()
    planned = list(_plan_entries(backbone))
    unknown = sorted({style for _, style in planned} - {*SPLIT, PARTIAL})
    split = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    uneven = [f"{key}={getattr(config, key)}" for key in split if getattr(config, key, size) % size]
    obstacles = {
        "it has no plan in config.base_model_tp_plan": not planned,
        f"its plan asks for {', '.join(unknown)}": bool(unknown),
        f"{size} ranks do not divide {', '.join(uneven)}": bool(uneven),
        "it has adapters with DoRA": any("lora_magnitude" in parameter for parameter, _ in backbone.named_parameters()),
    }
    for obstacle, found in obstacles.items():
        if found:
            raise ValueError(f'expected a model that tensor parallelism can split, got {name}: {obstacle}; use "fsdp2"')


def add_up_partial_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Adds up the gradients of parameters that are whole on each rank but met only some of the heads."""
    for part in _backbones(model):
        for module, style in _plan_entries(part):
            for parameter in module.parameters() if style == PARTIAL else ():
                if (grad := parameter.grad) is not None:
                    dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=group)


def _backbones(model: nn.Module) -> Iterator[PreTrainedModel]:
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.base_model is part:
            yield part


def _plan_entries(backbone: PreTrainedModel) -> Iterator[tuple[nn.Module, str]]:
    """Module and style of everything that the plan names and the model has."""
    plan = getattr(backbone.config.get_text_config(), "base_model_tp_plan", None) or {}
    for name, module in backbone.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None:
            yield module, style
