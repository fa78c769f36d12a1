"""Lockstep: the ranks of a recorded run as threads of one process, so that sums over ranks come out as they did."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from lightning_rl import distributed

ResultT = TypeVar("ResultT")


class Lockstep:
    """Runs one function per rank; whatever they sum or join is exchanged between them, in rank order.

    Args:
        ranks: how many.
    """

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.given: list[Tensor] = [torch.empty(0)] * ranks
        self.own = threading.local()

    def run(self, functions: Sequence[Callable[[], ResultT]], *, threads: int) -> list[ResultT]:
        """What each function returns, with ``threads`` of torch to compute it; an error of one ends all."""
        with self._collectives(), ThreadPoolExecutor(len(functions)) as pool:
            futures = [pool.submit(self._as_rank, rank, own, threads) for rank, own in enumerate(functions)]
            errors = [error for future in futures if (error := future.exception()) is not None]
            for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
                raise error
            return [future.result() for future in futures]

    def _as_rank(self, rank: int, function: Callable[[], ResultT], threads: int) -> ResultT:
        self.own.rank = rank
        torch.set_num_threads(threads)
        try:
            return function()
        except BaseException:
            self.barrier.abort()
            raise

    @contextmanager
    def _collectives(self) -> Iterator[None]:
        with (
            patch.object(distributed, "global_sum", lambda values: torch.stack(self._gathered(values)).sum(0)),
            patch.object(distributed, "global_concat", lambda values: torch.cat(self._gathered(values))),
        ):
            yield

    def _gathered(self, values: Tensor) -> list[Tensor]:
        self.given[self.own.rank] = values
        self.barrier.wait()
        everyone = list(self.given)
        self.barrier.wait()
        return everyone
