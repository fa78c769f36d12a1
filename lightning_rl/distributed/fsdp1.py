"""FSDP1: weights of each layer sharded over the ranks as one flat tensor; wrapped here instead of by Lightning.

Lightning wraps the whole module, which breaks accumulation and clipping within a training step, and a forward before
the first step.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from typing_extensions import override

from lightning_rl.distributed.parallel import Parallel

WRAPPER = "_fsdp_wrapped_module"


class FullyShardedDataParallel1(Parallel):
    """FSDPStrategy."""

    sharded = True
    repeats_steps = False
    compiles = False

    @override
    def check(self, max_grad_norm: float | None) -> None:
        super().check(max_grad_norm)
        strategy = cast(Any, self.strategy)
        if strategy._activation_checkpointing_kwargs:  # noqa: SLF001 - no public attribute
            raise ValueError(
                "expected FSDPStrategy without activation_checkpointing, which would have no effect: pass "
                "model=ModelOptions(activation_checkpointing=True) to RLLightningModule"
            )
        if "auto_wrap_policy" in strategy.kwargs or not strategy.kwargs["use_orig_params"]:
            raise ValueError(
                "expected FSDPStrategy without auto_wrap_policy and use_orig_params: each layer is wrapped by default, "
                "and LoRA and parameter groups need the original parameters"
            )

    @override
    def shard(self, model: nn.Module, layers: list[nn.Module], mesh: Any = None) -> nn.Module:
        strategy = cast(FSDPStrategy, self.strategy)
        precision = strategy.mixed_precision_config  # without it, bf16-mixed has no effect
        if precision is not None:
            precision = replace(precision, buffer_dtype=None)  # see PolicyModel._apply
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(layer) for layer in layers}),
            device_id=strategy.root_device,
            mixed_precision=precision,
            sharding_strategy=strategy.sharding_strategy,
            cpu_offload=strategy.cpu_offload,
            **strategy.kwargs,
        )

    @override
    def accumulating(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        offloads = cast(Any, self.strategy).cpu_offload.offload_params  # offloaded shards do not accumulate gradients
        return cast(FullyShardedDataParallel, model).no_sync() if offloads and not last else nullcontext()

    @override
    def clipped_norm(self, model: nn.Module, limit: float) -> Tensor:
        return cast(FullyShardedDataParallel, model).clip_grad_norm_(limit)

    @override
    def full_parameters(self, model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        units = [(name, part) for name, part in model.named_modules() if isinstance(part, FullyShardedDataParallel)]
        for place, unit in units:
            parts = [name for name, part in unit.named_modules() if isinstance(part, FullyShardedDataParallel) and name]
            inner = tuple(f"{unwrapped_name(name)}." for name in parts)
            with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
                for name, parameter in unit.named_parameters():
                    if not unwrapped_name(name).startswith(inner):
                        yield (
                            ".".join(part for part in (unwrapped_name(place), unwrapped_name(name)) if part),
                            parameter.detach(),
                        )


def unwrapped_name(name: str) -> str:
    """Return the name of a parameter without the modules that FSDP1 wraps around its layers."""
    return ".".join(part for part in name.split(".") if part != WRAPPER)
