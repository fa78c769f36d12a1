"""Lockstep: one correction on the rows of several ranks in one process, each of which hears what the others gather,
and the numbers that it has on each of them.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rl.audit.copies import copy_state, numbers_of
from lightning_rl.audit.evidence import Contribution
from lightning_rl.corrections import RLCallback
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


def with_numbers_of_others(callback: RLCallback, numbers: Sequence[Mapping[str, float]]) -> Iterator[RLCallback]:
    """Copies of a correction with the numbers that it has on each rank where they are others.

    Args:
        callback: as it is here.
        numbers: :func:`numbers_of` it on each rank.
    """
    own = numbers_of(callback)
    for theirs in numbers:
        others = {name: value for name, value in theirs.items() if name in own and not _equal(own[name], value)}
        if others:
            twin = copy_state(callback)
            for name, value in others.items():
                _write(twin, name, value)
            yield twin


def _equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))


def _write(thing: Any, name: str, value: float) -> None:
    """Replaces a number, of a kind that stays."""
    *path, last = name.split(".")
    for step in path:
        thing = getattr(thing, step)
    held = getattr(thing, last)
    new = torch.full_like(held, value) if isinstance(held, Tensor) else type(held)(value)
    object.__setattr__(thing, last, new)
