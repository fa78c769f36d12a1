"""Ranks as threads of one process, in which sums over ranks keep their order."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rl.distributed.collectives import Collectives

ResultT = TypeVar("ResultT")


class ThreadedRanks(Collectives):
    """Collectives of ``number`` concurrent functions, one per rank; results are in rank order.

    Args:
        number: Number of ranks.
        timeout: Seconds after which a collective that some ranks do not join is an error; None for no limit.
    """

    def __init__(self, number: int, timeout: float | None = None) -> None:
        super().__init__()
        self._number, self._barrier, self._local = number, threading.Barrier(number, timeout=timeout), threading.local()
        self._values: list[Any] = [None] * number

    def run(self, functions: Sequence[Callable[[], ResultT]], *, threads: int) -> list[ResultT]:
        """Return the result of each function, run with ``threads`` torch threads; an error of one ends all."""
        with ThreadPoolExecutor(len(functions)) as pool:
            futures = [pool.submit(self._run_as, rank, job, threads) for rank, job in enumerate(functions)]
            errors = [error for future in futures if (error := future.exception()) is not None]
            for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
                raise error
            return [future.result() for future in futures]

    def _run_as(self, rank: int, function: Callable[[], ResultT], threads: int) -> ResultT:
        self._local.rank = rank
        torch.set_num_threads(threads)
        try:
            return function()
        except BaseException:
            self._barrier.abort()
            raise

    @property
    @override
    def ranks(self) -> int:
        """Number of ranks."""
        return self._number

    @override
    def objects(self, value: ResultT) -> list[ResultT]:
        """Return the objects of all ranks, in rank order."""
        self._values[self._local.rank] = value
        self._barrier.wait()
        everyone = list(self._values)
        self._barrier.wait()
        return everyone

    @override
    def gather(self, values: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order."""
        return self.objects(values)
