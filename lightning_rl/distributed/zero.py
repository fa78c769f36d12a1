"""DeepSpeed ZeRO: optimizer states (1), gradients (2) and weights (3) sharded over the ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, cast

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rl.distributed.parallel import Accept, Parallel

CASTS = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}  # dtype of float32 weights by precision


class ZeRO(Parallel):
    """DeepSpeedStrategy, any stage."""

    repeats_steps = False
    compiles = False

    @property
    def sharded(self) -> bool:  # pyrefly: ignore[bad-override]
        """True if weights are sharded, in stage 3."""
        return bool(cast(DeepSpeedStrategy, self.strategy).zero_stage_3)

    @override
    def check(self, max_grad_norm: float | None) -> None:
        super().check(max_grad_norm)
        config = cast(dict[str, Any], cast(DeepSpeedStrategy, self.strategy).config)
        expected = 0.0 if max_grad_norm is None else max_grad_norm
        configured = config.setdefault("gradient_clipping", expected)
        if configured != expected:
            raise ValueError(
                f'expected one bound of the gradient norm, got max_grad_norm={max_grad_norm} and "gradient_clipping": '
                f"{configured} in DeepSpeed's config: leave the latter out"
            )
        if config.get("gradient_accumulation_steps", 1) != 1:
            raise ValueError(
                'expected DeepSpeed\'s config without "gradient_accumulation_steps": microbatches follow '
                "max_tokens_per_microbatch"
            )
        if "bf16" in config:
            config["bf16"].setdefault("check_grad_overflow", True)  # skip steps with a non-finite gradient

    @override
    @contextmanager
    def building(self) -> Iterator[None]:
        partition = import_module("deepspeed.runtime.zero.partition_parameters")
        active = partition.zero_init_context  # would change the initial weights of models and adapters
        if active:
            partition.shutdown_init_context()
        try:
            yield
        finally:
            if active:
                partition.restore_init_context()

    @override
    def shard(self, model: nn.Module, layers: list[nn.Module], mesh: Any = None) -> nn.Module:
        if self.sharded:
            zero = import_module("deepspeed").zero
            for parameter in cast(Any, model).head_parameters():  # used outside of their layer
                zero.register_external_parameter(model, parameter)
        return model

    @override
    def shard_frozen(self, model: nn.Module, layers: list[nn.Module], mesh: Any = None) -> nn.Module:
        """Cast the model and shard it by FSDP2, because DeepSpeed does both for optimized parameters only."""
        plugin = self.strategy.precision_plugin
        model = cast(nn.Module, plugin.convert_module(model)).to(CASTS.get(str(plugin.precision)))
        if self.sharded:
            mesh = init_device_mesh(self.strategy.root_device.type, (self.ranks,))
            for part in (*layers, model):
                fully_shard(part, mesh=mesh, reshard_after_forward=True)  # also the root, which has no backward
        return model

    @override
    @contextmanager
    def accumulating(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        engine = cast(Any, self.strategy.model)
        engine.set_gradient_accumulation_boundary(last)
        engine.optimizer.clear_backward_seen_flag()  # else stage 3 overwrites instead of adding
        yield

    @override
    def step(self, model: nn.Module, optimizer: LightningOptimizer, accept: Accept) -> Tensor:
        optimizer.step()  # clips, skips steps with a non-finite gradient, and clears
        norm = torch.as_tensor(cast(Any, self.strategy.model).get_global_grad_norm(), dtype=torch.float64)
        accept(norm)
        return norm.to(self.strategy.root_device)

    @override
    def clip(self, model: nn.Module, optimizer: Optimizer, limit: float) -> None:
        """Do nothing, because the engine clips in its step."""

    @override
    def clear(self, optimizer: LightningOptimizer) -> None:
        """Do nothing, because the engine clears gradients in its step."""

    @override
    def full_parameters(self, model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            with import_module("deepspeed").zero.GatheredParameters([parameter], enabled=self.sharded):
                yield name, parameter.detach()
