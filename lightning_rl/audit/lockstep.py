"""Lockstep: one correction on the rows of several ranks in one process, each of which hears what the others gather."""

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_rl.audit.evidence import Contribution
from lightning_rl.distributed import Collectives
from lightning_rl.rollout import Rollout

MAX_TURNS = 100  # collectives of one contribution


class _Waiting(Exception):  # noqa: N818
    """A rank waits for the others."""


class _Rank(Collectives):
    """The collectives of one rank: what all have gathered so far, and then its own share of the next."""

    def __init__(self, number: int, gathered: Sequence[list[Tensor]]) -> None:
        super().__init__()
        self.number, self._gathered, self._turn = number, gathered, 0
        self.offer: Tensor | None = None

    @property
    @override
    def ranks(self) -> int:
        return self.number

    @override
    def gather(self, values: Tensor) -> list[Tensor]:
        if self._turn == len(self._gathered):
            self.offer = values
            raise _Waiting
        self._turn += 1
        return self._gathered[self._turn - 1]


def contribute_on_ranks(contribution: Contribution, rows: Sequence[Rollout]) -> list[Any]:
    """What a correction contributes to the rows of each rank, asked again until every collective is known.

    Raises:
        RuntimeError: if the ranks differ in their collectives, which would hang a run.
    """
    gathered = list[list[Tensor]]()
    for _ in range(MAX_TURNS):
        said, shares = list[Any](), list[Tensor]()
        for part in rows:
            rank = _Rank(len(rows), gathered)
            callback = copy.copy(contribution.callback)
            callback.collectives = rank
            try:
                said.append(contribution._replace(callback=callback)(part))
            except _Waiting:
                shares.append(rank.offer)  # pyright: ignore[reportArgumentType]  set before it waits
        if not shares:
            return said
        if len(shares) != len(rows):
            break
        gathered.append(shares)
    raise RuntimeError(f"expected the same collectives of {contribution} on every rank, got other ones")
