"""What depends on the strategy: sums over ranks, accumulation, clipping, full weights. The rest does not know it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn


@runtime_checkable
class _SyncsGradients(Protocol):
    require_backward_grad_sync: bool


def check_support(strategy: Strategy) -> None:
    """Refuses strategies and precisions under which a gradient would be silently wrong.

    Raises:
        ValueError: naming what works.
    """
    check_precision(strategy.precision_plugin)
    if type(strategy) not in (SingleDeviceStrategy, DDPStrategy):
        raise ValueError(
            f"expected a single device or DDPStrategy, got {type(strategy).__name__}: sharded strategies are not "
            'supported yet; use strategy="ddp" or one device'
        )
    if strategy.root_device.type == "mps":
        raise ValueError('expected a device with float64, which statistics need, got mps: use accelerator="cpu"')


def check_precision(plugin: Precision) -> None:
    """Refuses a gradient scaler: the norm would be judged and clipped while it is still scaled.

    Raises:
        ValueError: naming the precision to use.
    """
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        raise ValueError('expected a precision without gradient scaler, got 16-mixed: use precision="bf16-mixed"')


def world_size() -> int:
    """Number of training processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def global_sum(values: Tensor) -> Tensor:
    """Adds a tensor up over all ranks, in rank order. A collective: every rank calls it."""
    return torch.stack(global_gather(values)).sum(0) if world_size() > 1 else values


def global_gather(values: Tensor) -> list[Tensor]:
    """The tensors of all ranks, of one shape, in rank order. A collective: every rank calls it."""
    if world_size() == 1:
        return [values]
    parts = [torch.empty_like(values) for _ in range(world_size())]
    dist.all_gather(parts, values.contiguous())
    return parts


def global_concat(values: Tensor) -> Tensor:
    """Tensors [N], of any length on each rank, joined in rank order. A collective: every rank calls it."""
    if world_size() == 1:
        return values
    longest = global_maximum([len(values)], values.device)[0]
    lengths = global_gather(torch.tensor(len(values), device=values.device))
    padded = torch.cat([values, values.new_zeros(longest - len(values))])
    return torch.cat([part[: int(length)] for part, length in zip(global_gather(padded), lengths, strict=True)])


def global_maximum(numbers: Sequence[int], device: torch.device) -> list[int]:
    """The element-wise maximum of a list over all ranks. A collective: every rank calls it."""
    return torch.stack(global_gather(torch.tensor(numbers, device=device))).amax(0).tolist()


def gathered_objects(mine: object) -> list[object]:
    """One object of every rank, in rank order. A collective: every rank calls it."""
    if world_size() == 1:
        return [mine]
    everyone: list[object] = [None] * world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


@contextmanager
def accumulating(strategy: Strategy, *, last: bool) -> Iterator[None]:
    """Around a microbatch's forward and backward: gradients are exchanged only after the last one of the step."""
    model = strategy.model
    if not isinstance(model, _SyncsGradients):
        yield
        return
    before = model.require_backward_grad_sync
    model.require_backward_grad_sync = last
    try:
        yield
    finally:
        model.require_backward_grad_sync = before


def clipped_gradient_norm(module: nn.Module, limit: float | None) -> Tensor:
    """The gradient norm before clipping, after which the gradient is scaled down to ``limit`` if that is given."""
    bound = float("inf") if limit is None else limit
    return nn.utils.clip_grad_norm_(module.parameters(), bound, foreach=None)


def full_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and full value of each parameter, one at a time. Every rank iterates to the end."""
    for name, parameter in module.named_parameters():
        yield name, parameter.detach()
