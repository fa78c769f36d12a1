"""Ranks without processes: functions that share sums and concatenations run until all have what they wait for."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from lightning_rl.signal.masked import GlobalSum
from lightning_rl.signal.selection import GlobalConcat

T = TypeVar("T")


class _Waiting(Exception):  # noqa: N818
    pass


@dataclass
class _Rank:
    joined: Sequence[Tensor]
    seen: int = 0
    asked: list[tuple[str, Tensor]] = field(default_factory=list)

    def ask(self, kind: str, values: Tensor) -> Tensor:
        if self.seen < len(self.joined):
            self.seen += 1
            return self.joined[self.seen - 1]
        self.asked.append((kind, values))
        raise _Waiting


def in_lockstep(*ranks: Callable[[GlobalSum, GlobalConcat], T]) -> list[T]:
    """Return the result of each rank. The n-th collective of all ranks is one call of the same kind.

    Raises:
        AssertionError: if the ranks do not call the same collectives, which would deadlock a real run.
    """
    joined: list[Tensor] = []
    while True:
        players = [_Rank(joined) for _ in ranks]
        found = []
        for rank, player in zip(ranks, players, strict=True):
            with suppress(_Waiting):
                found.append(
                    rank(
                        lambda values, own=player: own.ask("sum", values),
                        lambda values, own=player: own.ask("concat", values),
                    )
                )
        asked = [request for player in players for request in player.asked]
        if not asked:
            assert all(player.seen == len(joined) for player in players), "a rank makes fewer collective calls"
            return found
        assert len(asked) == len(ranks), "a rank makes fewer collective calls than another"
        assert len({kind for kind, _ in asked}) == 1, "ranks make different collective calls"
        given = [values for _, values in asked]
        joined.append(torch.stack(given).sum(0) if asked[0][0] == "sum" else torch.cat(given))
