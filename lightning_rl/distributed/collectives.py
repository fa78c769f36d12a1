"""Collectives: sums, joins and maxima over ranks, merged in rank order. Every rank calls them equally often."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Number of training processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def global_sum(values: Tensor) -> Tensor:
    """Adds a tensor up over all ranks, in rank order."""
    return torch.stack(global_gather(values)).sum(0) if world_size() > 1 else values


def global_gather(values: Tensor) -> list[Tensor]:
    """The tensors of all ranks, of one shape, in rank order."""
    if world_size() == 1:
        return [values]
    parts = [torch.empty_like(values) for _ in range(world_size())]
    dist.all_gather(parts, values.contiguous())
    return parts


def global_concat(values: Tensor) -> Tensor:
    """Tensors [N], of any length on each rank, joined in rank order."""
    if world_size() == 1:
        return values
    longest = global_maximum([len(values)], values.device)[0]
    lengths = global_gather(torch.tensor(len(values), device=values.device))
    padded = torch.cat([values, values.new_zeros(longest - len(values))])
    return torch.cat([part[: int(length)] for part, length in zip(global_gather(padded), lengths, strict=True)])


def global_maximum(numbers: Sequence[int], device: torch.device) -> list[int]:
    """The element-wise maximum of a list over all ranks."""
    return torch.stack(global_gather(torch.tensor(numbers, device=device))).amax(0).tolist()


def gathered_objects(mine: object) -> list[object]:
    """One object of every rank, in rank order."""
    if world_size() == 1:
        return [mine]
    everyone: list[object] = [None] * world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
