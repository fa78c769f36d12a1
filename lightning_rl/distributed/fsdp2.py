"""FSDP2: every parameter sharded over the ranks as a DTensor, gathered layer by layer."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, cast

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from typing_extensions import override

from lightning_rl.distributed.collectives import Collectives
from lightning_rl.distributed.parallel import Parallel
from lightning_rl.distributed.tensor import add_up_partial_gradients, split_layers


class FSDP2Strategy(ModelParallelStrategy):
    """ModelParallelStrategy that shards the weights over all ranks: ``Trainer(strategy="fsdp2")``.

    Lightning's default uses the ranks of a node for tensor parallelism, which leaves one node without data parallelism.

    Args:
        tensor_parallel_size: Number of adjacent ranks that shard each layer and hold the same rows.
        options: Options of ModelParallelStrategy, except ``data_parallel_size``.
    """

    def __init__(self, *, tensor_parallel_size: int = 1, **options: Any) -> None:
        super().__init__(data_parallel_size="auto", tensor_parallel_size=tensor_parallel_size, **options)

    @override
    def setup_environment(self) -> None:
        processes, split = self.num_nodes * self.num_processes, cast(int, self._tensor_parallel_size)
        if processes % split:
            raise ValueError(f"expected tensor_parallel_size to divide {processes} ranks, got {split}")
        self._data_parallel_size = processes // split
        super().setup_environment()


StrategyRegistry.register("fsdp2", FSDP2Strategy, description="FSDP2 over all ranks", override=True)


class FullyShardedDataParallel2(Parallel):
    """ModelParallelStrategy, with or without tensor parallelism."""

    sharded = True
    splits_first = True
    repeats_steps = False

    @property
    def mesh(self) -> DeviceMesh:
        """Mesh of data parallel x tensor parallel ranks."""
        return cast(ModelParallelStrategy, self.strategy).device_mesh

    @property
    def compiles(self) -> bool:  # pyrefly: ignore[bad-override]
        """True without tensor parallelism, where the parts of a layer are whole when called."""
        return self.mesh["tensor_parallel"].size() == 1

    @property
    @override
    def ranks(self) -> int:
        return self.mesh["data_parallel"].size()

    @property
    @override
    def rank(self) -> int:
        return self.mesh["data_parallel"].get_local_rank()

    @cached_property
    @override
    def collectives(self) -> Collectives:
        rows, layers = self.mesh["data_parallel"], self.mesh["tensor_parallel"]
        return Collectives() if layers.size() == 1 else Collectives(rows.get_group(), layers.get_group())

    @override
    def shard(self, model: nn.Module, layers: list[nn.Module], mesh: Any = None) -> nn.Module:
        if mesh["tensor_parallel"].size() > 1:
            split_layers(model, mesh["tensor_parallel"])
        mixed = str(self.strategy.precision_plugin.precision) == "bf16-mixed"  # autocast would round what was gathered
        options: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if mixed else {}
        precision = MixedPrecisionPolicy(**options, cast_forward_inputs=False)  # a cast copies routes of experts
        for part in (*layers, model):
            fully_shard(part, mesh=mesh["data_parallel"], mp_policy=precision)
        return model

    @override
    def shard_frozen(self, model: nn.Module, layers: list[nn.Module], mesh: Any = None) -> nn.Module:
        split = super().shard_frozen(model, layers, mesh)
        cast(FSDPModule, split).set_reshard_after_forward(True)  # the root is not resharded by default
        return split

    @override
    def optimizer_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Split each group by mesh, because fused kernels take tensors of one mesh only."""
        split: list[dict[str, Any]] = []
        for group in groups:
            for number, parameters in enumerate(_by_mesh(group["params"])):
                split.append(group | {"params": parameters, "name": group["name"] + ("/split" if number else "")})
        return split

    @override
    def complete_gradient(self, model: nn.Module) -> None:
        if self.collectives.layers is not None:
            add_up_partial_gradients(model, self.collectives.layers)

    @override
    def clipped_norm(self, model: nn.Module, limit: float) -> Tensor:
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        grads = [[cast(Tensor, parameter.grad) for parameter in part] for part in _by_mesh(parameters)]
        norms = torch.stack([_full(nn.utils.get_total_norm(part)) for part in grads])
        norm = torch.linalg.vector_norm(norms)
        for part in _by_mesh(parameters) if limit < torch.inf else ():
            nn.utils.clip_grads_with_norm_(part, limit, norm)
        return norm

    @override
    def full_parameters(self, model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        cast(FSDPModule, model).reshard()  # after a pass without backward it still has the gathered, rounded weights
        for name, parameter in model.named_parameters():
            part = parameter.detach()
            smaller = dtype is not None and part.is_floating_point() and dtype.itemsize < part.dtype.itemsize
            yield name, _full(part.to(dtype) if smaller else part)


def _by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the replicated parameters, then those under tensor parallelism, whose DTensors have another mesh."""
    split = [isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1 for parameter in parameters]
    parts = [[p for p, is_split in zip(parameters, split, strict=True) if is_split is kind] for kind in (False, True)]
    return [part for part in parts if part]


def _full(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.ndim > 1:  # one mesh dimension at a time; PyTorch warns of consecutive gathers
        tensor = tensor.redistribute(placements=(Replicate(), *tensor.placements[1:]))
    return tensor.full_tensor()
