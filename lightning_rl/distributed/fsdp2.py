"""FSDP2: every parameter split over the ranks as a DTensor, gathered layer by layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_rl.distributed.parallel import Parallel


class FSDP2Strategy(ModelParallelStrategy):
    """ModelParallelStrategy that splits the weights over all ranks: ``Trainer(strategy="fsdp2")``.

    Lightning's own default takes the ranks of a node for tensor parallelism, so one node would have no data
    parallelism at all.

    Args:
        options: for ModelParallelStrategy, except the sizes.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(data_parallel_size="auto", tensor_parallel_size=1, **options)

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


StrategyRegistry.register("fsdp2", FSDP2Strategy, description="FSDP2 over all ranks", override=True)


class FullyShardedDataParallel2(Parallel):
    """ModelParallelStrategy without tensor parallelism."""

    sharded = True

    @override
    def check(self, max_grad_norm: float | None) -> None:
        super().check(max_grad_norm)
        mesh = cast(ModelParallelStrategy, self.strategy).device_mesh
        if mesh["tensor_parallel"].size() != 1:
            raise ValueError(
                f"expected tensor_parallel_size=1, got {mesh['tensor_parallel'].size()}, which on one node is "
                'Lightning\'s default: use Trainer(strategy="fsdp2") or lightning_rl.FSDP2Strategy'
            )

    @override
    def shard(self, model: nn.Module, layers: list[nn.Module], mesh: Any = None) -> nn.Module:
        for part in (*layers, model):
            fully_shard(part, mesh=mesh["data_parallel"])
        return model

    @override
    @contextmanager
    def accumulating(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        cast(FSDPModule, model).set_requires_gradient_sync(last)
        yield

    @override
    def clipped_norm(self, model: nn.Module, limit: float) -> Tensor:
        return _full(super().clipped_norm(model, limit))

    @override
    def full_parameters(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            yield name, _full(parameter.detach())


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
