"""Collectives in rank order, which every rank has to call equally often.

Under tensor parallelism, ranks that shard a layer hold the same rows, which count once: a :class:`Collectives` runs
over the ranks with different rows. The plain functions run over all processes.

Objects and long waits (for an engine, rewards or a disk) use gloo groups next to the strategy's group, whose timeout is
at most half an hour.
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

from lightning_rl.distributed.network import cure_of

Anything = TypeVar("Anything")

SAID = 500  # maximum number of characters of another rank's error in a message
UNREACHED = "set GLOO_SOCKET_IFNAME to the network interface that reaches the other nodes"
PATIENCE = timedelta(hours=6)  # longer than any wait; the death of a process raises immediately


class RunEndError(RuntimeError):
    """Error that ends a run on every rank between two optimizer steps, after a checkpoint has been written."""


class Collectives:
    """Collectives of a :class:`~lightning_rl.distributed.Parallel`.

    Args:
        rows: Group of the ranks with different rows; None for all processes.
        layers: Group of the ranks that shard each layer and hold the same rows; None for no tensor parallelism.
    """

    def __init__(self, rows: dist.ProcessGroup | None = None, layers: dist.ProcessGroup | None = None) -> None:
        self.rows, self.layers = rows, layers

    @property
    def ranks(self) -> int:
        """Number of ranks whose rows differ."""
        return dist.get_world_size(self.rows) if process_count() > 1 else 1

    def gather(self, values: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have one shape, in rank order."""
        if self.ranks == 1:
            return [values]
        parts = [torch.empty_like(values) for _ in range(self.ranks)]
        dist.all_gather(parts, values.contiguous(), group=self.rows)
        return parts

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in rank order."""
        return torch.stack(self.gather(values)).sum(0) if self.ranks > 1 else values

    def concat(self, values: Tensor) -> Tensor:
        """Concatenate tensors ``[N]``, where N may differ between ranks, in rank order."""
        if self.ranks == 1:
            return values
        lengths = self.gather(torch.tensor(len(values), device=values.device))
        padding = values.new_zeros(max(map(int, lengths)) - len(values))
        parts = self.gather(torch.cat([values, padding]))
        return torch.cat([part[: int(length)] for part, length in zip(parts, lengths, strict=True)])

    def maximum(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """Return the element-wise maximum of a list over all ranks."""
        return torch.stack(self.gather(torch.tensor(numbers, device=device))).amax(0).tolist()

    def objects(self, value: Anything) -> list[Anything]:
        """Return the object of every rank, in rank order."""
        return _gather_objects(value, self.ranks, self.rows)

    @property
    def generates(self) -> bool:
        """True if this rank generates and scores, for itself and the other ranks with the same rows."""
        return self.layers is None or dist.get_rank(self.layers) == 0

    def share(self, value: Anything) -> Anything:
        """Broadcast a value from the rank that generates to the other ranks with the same rows."""
        if self.layers is None:
            return value
        shared = [value]
        dist.broadcast_object_list(shared, group=_waiting(self.layers), group_src=0)
        return shared[0]


class Alone(Collectives):
    """Collectives of this rank only, for work that differs between ranks."""

    @property
    def ranks(self) -> int:
        """Always 1."""
        return 1


ALONE = Alone()


def process_count() -> int:
    """Return the number of training processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process_objects(value: Anything) -> list[Anything]:
    """Return the object of every process, in rank order."""
    return _gather_objects(value, process_count(), None)


def process_maximum(number: int) -> int:
    """Return the largest number over all processes."""
    largest = torch.tensor(number)
    if process_count() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=_waiting(None))
    return int(largest)


def meet(seconds: float, value: Anything = None) -> list[Anything] | None:
    """Return the objects of all processes in rank order if all call this within some seconds, else None.

    It uses a separate group, so other processes may be in another collective. The first call has to be made by all
    together.
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
    """Raise on every rank if one fails inside; every rank has to enter this context.

    Args:
        what: Description of the work, for the message.
        kind: Class of errors that is raised on every rank or on none.

    Raises:
        RuntimeError: On ranks that did not fail, with the ranks that did; of class ``kind`` if all errors are.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  raised again after all ranks have exchanged their errors
        failure = error
    report = None if failure is None else (isinstance(failure, kind), f"{type(failure).__name__}: {failure}"[:SAID])
    failures = {rank: other for rank, other in enumerate(process_objects(report)) if other is not None}
    alike = all(of_kind for of_kind, _ in failures.values())
    if failure is not None and (alike or not isinstance(failure, kind)):
        raise failure
    if failures:
        raised, (rank, (_, error)) = kind if alike else RuntimeError, next(iter(failures.items()))
        where = f"it failed on {list(failures)}: see their errors, on rank {rank} {error}"
        raise raised(f"expected {what} on every rank, but {where}") from failure


def end_at_exit() -> None:
    """Destroy the process groups at exit, before the interpreter ends.

    A gloo thread that still releases a tensor would abort the finished process. Lightning destroys the NCCL group only,
    and a gloo group joins its threads only after its last reference is gone.
    """
    atexit.unregister(_end_group)
    atexit.register(_end_group)


def _end_group() -> None:
    if dist.is_available() and dist.is_initialized():
        _made.clear()
        dist.destroy_process_group()
        gc.collect()  # trainers and strategies hold groups in reference cycles


def _gather_objects(value: Anything, number: int, group: dist.ProcessGroup | None) -> list[Anything]:
    if number == 1:
        return [value]
    everyone: list[Anything] = [value] * number
    dist.all_gather_object(everyone, value, group=_waiting(group))
    return everyone


_made: dict[tuple[str, Any], tuple[Any, dist.ProcessGroup]] = {}


def _waiting(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the gloo group next to a group, for objects and long waits."""
    return _groups("waiting", group)


def _groups(purpose: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a gloo group with the processes of another group; all of them create it on first use."""
    if any(group is made for _, made in _made.values()):
        return group  # pyrefly: ignore[bad-return]
    whole, ranks = dist.group.WORLD, None if group is None else dist.get_process_group_ranks(group)
    key = purpose, None if ranks is None else tuple(ranks)
    if key not in _made or _made[key][0] is not whole:  # the strategy's groups of an earlier fit are gone
        try:
            made = dist.new_group(ranks, PATIENCE, backend="gloo", use_local_synchronization=ranks is not None)
        except RuntimeError as failure:
            raise RuntimeError(
                f"expected to create a gloo group for long waits, got {failure}: {cure_of(failure) or UNREACHED}"
            ) from failure
        _made[key] = whole, cast(dist.ProcessGroup, made)
    return _made[key][1]
