"""Collectives: sums, joins and maxima over ranks, merged in rank order. Every rank calls them equally often.

Ranks that split a layer between them (tensor parallelism) work on the same rows, which count once: what is called
global here runs over the ranks whose rows differ.
"""

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Anything = TypeVar("Anything")


@dataclass(slots=True)
class Groups:
    """The process groups of the strategy that runs; None stands for all processes and for this one alone.

    Attributes:
        rows: the ranks whose rows differ.
        layers: the ranks that hold a part of each layer and work on the same rows.
    """

    rows: dist.ProcessGroup | None = None
    layers: dist.ProcessGroup | None = None


GROUPS = Groups()
_alone: ContextVar[bool] = ContextVar("alone", default=False)


def world_size() -> int:
    """Number of training processes; 1 inside of :func:`alone`."""
    joined = not _alone.get() and dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if joined else 1


@contextmanager
def alone() -> Iterator[None]:
    """Makes every collective one of this rank alone, for work that other ranks may do otherwise, or not at all."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def end_at_exit() -> None:
    """Lets the process group end before the interpreter does.

    Threads of gloo that outlive it now and then abort a process that had finished; Lightning ends only NCCL's group.
    """
    atexit.unregister(_end_group)
    atexit.register(_end_group)


def _end_group() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def row_ranks() -> int:
    """Number of ranks whose rows differ."""
    return dist.get_world_size(GROUPS.rows) if world_size() > 1 else 1


def global_sum(values: Tensor) -> Tensor:
    """Adds a tensor up over all ranks, in rank order."""
    return torch.stack(global_gather(values)).sum(0) if row_ranks() > 1 else values


def global_gather(values: Tensor) -> list[Tensor]:
    """The tensors of all ranks, of one shape, in rank order."""
    if row_ranks() == 1:
        return [values]
    parts = [torch.empty_like(values) for _ in range(row_ranks())]
    dist.all_gather(parts, values.contiguous(), group=GROUPS.rows)
    return parts


def global_concat(values: Tensor) -> Tensor:
    """Tensors [N], of any length on each rank, joined in rank order."""
    if row_ranks() == 1:
        return values
    longest = global_maximum([len(values)], values.device)[0]
    lengths = global_gather(torch.tensor(len(values), device=values.device))
    padded = torch.cat([values, values.new_zeros(longest - len(values))])
    return torch.cat([part[: int(length)] for part, length in zip(global_gather(padded), lengths, strict=True)])


def global_maximum(numbers: Sequence[int], device: torch.device) -> list[int]:
    """The element-wise maximum of a list over all ranks."""
    return torch.stack(global_gather(torch.tensor(numbers, device=device))).amax(0).tolist()


@contextmanager
def failing_together(what: str, kind: type[RuntimeError] = RuntimeError) -> Iterator[None]:
    """Raises on every rank if one fails inside. Every rank takes part.

    Args:
        what: is done inside, for the message.
        kind: of error that is raised on every rank or on none.

    Raises:
        RuntimeError: on a rank that did not fail itself, naming those that did; of the kind if all their errors are.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  raised again once every rank knows
        failure = error
    kinds = gathered_objects(None if failure is None else isinstance(failure, kind))
    failed = [rank for rank, other in enumerate(kinds) if other is not None]
    alike = all(kinds[rank] for rank in failed)
    if failure is not None and (alike or not isinstance(failure, kind)):
        raise failure
    if failed:
        told = kind if alike else RuntimeError
        raise told(f"expected {what} on every rank, but it failed on {failed}: see their errors") from failure


def global_objects(mine: Anything) -> list[Anything]:
    """One object of every rank, in rank order."""
    return _gathered(mine, row_ranks(), GROUPS.rows)


def gathered_objects(mine: Anything) -> list[Anything]:
    """One object of every process, those that work on the same rows included, in rank order."""
    return _gathered(mine, world_size(), None)


def any_process(happened: int, device: torch.device) -> int:
    """The largest number over every process, those that work on the same rows included."""
    largest = torch.tensor(happened, device=device)
    if world_size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def draws() -> bool:
    """Whether this rank generates and scores, for itself and the others that work on the same rows."""
    return GROUPS.layers is None or dist.get_rank(GROUPS.layers) == 0


def from_drawing(mine: Anything) -> Anything:
    """What the rank has that generates and scores, on each rank that works on the same rows."""
    if GROUPS.layers is None:
        return mine
    shared = [mine]
    dist.broadcast_object_list(shared, group=GROUPS.layers, group_src=0)
    return shared[0]


def _gathered(mine: Anything, number: int, group: dist.ProcessGroup | None) -> list[Anything]:
    if number == 1:
        return [mine]
    everyone: list[Anything] = [mine] * number
    dist.all_gather_object(everyone, mine, group=group)
    return everyone
