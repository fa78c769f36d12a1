"""Collectives: sums, joins and maxima over ranks, merged in rank order. Every rank calls them equally often.

Ranks that split a layer between them (tensor parallelism) work on the same rows, which count once: a
:class:`Collectives` runs over the ranks whose rows differ. The plain functions run over every process.

Objects, and every wait for what may take a rank minutes (an engine, rewards, a disk), go through groups of gloo beside
those of the strategy, whose own patience is half an hour or less: nobody stands in one of the strategy's collectives
while another rank waits for a server.
"""

import atexit
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from lightning_rl.distributed.network import cure_of

Anything = TypeVar("Anything")

SAID = 500  # characters of an error that other ranks repeat
UNREACHED = "set GLOO_SOCKET_IFNAME to the network interface that reaches the other nodes"
PATIENCE = timedelta(hours=6)  # longer than every wait of ours; a process that dies is noticed at once


class RunEndError(RuntimeError):
    """Ends a run on every rank alike, between two optimizer steps, so that a checkpoint can be written first."""


class Collectives:
    """What ranks do together; the strategy's :class:`~lightning_rl.distributed.Parallel` makes it and hands it in.

    Args:
        rows: the ranks whose rows differ; None for all processes.
        layers: the ranks that hold a part of each layer and work on the same rows; None for this one alone.
    """

    def __init__(self, rows: dist.ProcessGroup | None = None, layers: dist.ProcessGroup | None = None) -> None:
        self.rows, self.layers = rows, layers

    @property
    def ranks(self) -> int:
        """Number of ranks whose rows differ."""
        return dist.get_world_size(self.rows) if process_count() > 1 else 1

    def gather(self, values: Tensor) -> list[Tensor]:
        """The tensors of all ranks, of one shape, in rank order."""
        if self.ranks == 1:
            return [values]
        parts = [torch.empty_like(values) for _ in range(self.ranks)]
        dist.all_gather(parts, values.contiguous(), group=self.rows)
        return parts

    def sum(self, values: Tensor) -> Tensor:
        """Adds a tensor up over all ranks, in rank order."""
        return torch.stack(self.gather(values)).sum(0) if self.ranks > 1 else values

    def concat(self, values: Tensor) -> Tensor:
        """Tensors [N], of any length on each rank, joined in rank order."""
        if self.ranks == 1:
            return values
        lengths = self.gather(torch.tensor(len(values), device=values.device))
        padding = values.new_zeros(max(map(int, lengths)) - len(values))
        parts = self.gather(torch.cat([values, padding]))
        return torch.cat([part[: int(length)] for part, length in zip(parts, lengths, strict=True)])

    def maximum(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """The element-wise maximum of a list over all ranks."""
        return torch.stack(self.gather(torch.tensor(numbers, device=device))).amax(0).tolist()

    def objects(self, value: Anything) -> list[Anything]:
        """One object of every rank, in rank order."""
        return _gather_objects(value, self.ranks, self.rows)

    @property
    def generates(self) -> bool:
        """Whether this rank generates and scores, for itself and the others that work on the same rows."""
        return self.layers is None or dist.get_rank(self.layers) == 0

    def share(self, value: Anything) -> Anything:
        """What the rank has that generates and scores, on each rank that works on the same rows."""
        if self.layers is None:
            return value
        shared = [value]
        dist.broadcast_object_list(shared, group=_waiting(self.layers), group_src=0)
        return shared[0]


class Alone(Collectives):
    """Collectives of this rank alone, for work that other ranks may do otherwise, or not at all."""

    @property
    def ranks(self) -> int:
        """1."""
        return 1


ALONE = Alone()


def process_count() -> int:
    """Number of training processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process_store() -> Store | None:
    """Where the processes met, and may leave word for each other at any time; None for one alone."""
    return dist.distributed_c10d._get_default_store() if process_count() > 1 else None  # noqa: SLF001  has no other name


def process_objects(value: Anything) -> list[Anything]:
    """One object of every process, those that work on the same rows included, in rank order."""
    return _gather_objects(value, process_count(), None)


def process_maximum(number: int) -> int:
    """The largest number over every process, those that work on the same rows included."""
    largest = torch.tensor(number)
    if process_count() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=_waiting(None))
    return int(largest)


def meet(seconds: float, value: Anything = None) -> list[Anything] | None:
    """One object of every process, if all of them come here within some seconds, wherever they come from.

    It has a group of its own, so a process that waits in another collective is no harm; a first call has to be made by
    all of them together.

    Returns:
        The objects in rank order, or None if somebody did not come.
    """
    if process_count() == 1:
        return [value]
    group = _groups("meeting", None)
    try:
        dist.monitored_barrier(group=group, timeout=timedelta(seconds=seconds))
        return _gather_objects(value, process_count(), group)
    except RuntimeError:
        return None


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
    said = None if failure is None else (isinstance(failure, kind), f"{type(failure).__name__}: {failure}"[:SAID])
    failures = {rank: other for rank, other in enumerate(process_objects(said)) if other is not None}
    alike = all(of_kind for of_kind, _ in failures.values())
    if failure is not None and (alike or not isinstance(failure, kind)):
        raise failure
    if failures:
        raised, (rank, (_, error)) = kind if alike else RuntimeError, next(iter(failures.items()))
        where = f"it failed on {list(failures)}: see their errors, on rank {rank} {error}"
        raise raised(f"expected {what} on every rank, but {where}") from failure


def end_at_exit() -> None:
    """Lets the process groups end before the interpreter does.

    A thread of gloo that has not let go of a tensor yet asks for the interpreter's lock, and aborts the process that
    had finished. Lightning ends only NCCL's group, and ``destroy_process_group`` joins the threads of a gloo group only
    once nobody holds it.
    """
    atexit.unregister(_end_group)
    atexit.register(_end_group)


def _end_group() -> None:
    if dist.is_available() and dist.is_initialized():
        _made.clear()
        dist.destroy_process_group()
        gc.collect()  # trainers and strategies, which hold groups, are cycles


def _gather_objects(value: Anything, number: int, group: dist.ProcessGroup | None) -> list[Anything]:
    if number == 1:
        return [value]
    everyone: list[Anything] = [value] * number
    dist.all_gather_object(everyone, value, group=_waiting(group))
    return everyone


_made: dict[tuple[str, Any], tuple[Any, dist.ProcessGroup]] = {}


def _waiting(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group of gloo beside a group, for objects and long waits."""
    return _groups("waiting", group)


def _groups(purpose: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group of gloo with the processes of another one; made by all of them when they first need it."""
    if any(group is made for _, made in _made.values()):
        return group  # pyright: ignore[reportReturnType]
    whole, ranks = dist.group.WORLD, None if group is None else dist.get_process_group_ranks(group)
    key = purpose, None if ranks is None else tuple(ranks)
    if key not in _made or _made[key][0] is not whole:  # the strategy's groups of an earlier fit are gone
        try:
            made = dist.new_group(ranks, PATIENCE, backend="gloo", use_local_synchronization=ranks is not None)
        except RuntimeError as failure:
            raise RuntimeError(
                "expected a group of gloo beside the strategy's own, for waits that may be long, got "
                f"{failure}: {cure_of(failure) or UNREACHED}"
            ) from failure
        _made[key] = whole, cast(dist.ProcessGroup, made)
    return _made[key][1]
