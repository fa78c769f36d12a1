"""Tensor parallelism: matrices of each layer sharded over ranks that hold the same rows.

The model's plan (``config.base_model_tp_plan`` of transformers) is applied. Attention heads and columns of the
feed-forward are sharded; embeddings, norms and the head are replicated.

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
PARTIAL = "replicated_with_grad_allreduce"  # replicated, but used by the local heads only


def split_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard every layer with a plan over a mesh with one dimension.

    Raises:
        ValueError: If a model has no plan or an unsupported one; with the alternative.
    """
    for part in _backbones(model):
        check_plan(part, mesh.size())
        for module, style in _plan_entries(part):
            # with LoRA, also the adapter's matrix with the sharded side: B for columns
            adapters = getattr(module, "lora_B" if style == "colwise" else "lora_A", {}).values()
            for linear in (getattr(module, "base_layer", module), *adapters) if style in SPLIT else ():
                parallelize_module(linear, mesh, SPLIT[style]())  # pyrefly: ignore[bad-argument-type]


def check_plan(backbone: PreTrainedModel, size: int) -> None:
    """Check that the plan can be applied.

    Raises:
        ValueError: With the model, the obstacle and the fix.
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
    for obstacle, present in obstacles.items():
        if present:
            raise ValueError(f'expected a model that tensor parallelism can split, got {name}: {obstacle}; use "fsdp2"')


def add_up_partial_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradients of replicated parameters that are used by the local heads only."""
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
    """Yield module and style of each entry of the plan that the model has."""
    plan = getattr(backbone.config.get_text_config(), "base_model_tp_plan", None) or {}
    for name, module in backbone.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None:
            yield module, style
