"""Collectives: what ranks get from each other, and what a rank alone does without asking anybody."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_rl.distributed import ALONE, Collectives, collectives

ENDED_AFTER = 20.0  # seconds that a rank waits for the others


class OneOfSeveral(Collectives):
    """A rank among threads that meet at every gather."""

    def __init__(self, rank: int, board: list[Tensor], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.board, self.barrier = rank, board, barrier

    @property
    @override
    def ranks(self) -> int:
        return len(self.board)

    @override
    def gather(self, values: Tensor) -> list[Tensor]:
        self.board[self.rank] = values
        self.barrier.wait(ENDED_AFTER)
        parts = list(self.board)
        self.barrier.wait(ENDED_AFTER)
        assert len({part.shape for part in parts}) == 1, "ranks can gather tensors of one shape alone"
        return parts


def on_ranks(function: Callable[[Collectives, Any], Any], *inputs: Any) -> list[Any]:
    """Return the results of a function on each rank."""
    board, barrier = [torch.empty(0)] * len(inputs), threading.Barrier(len(inputs))
    ranks = [OneOfSeveral(rank, board, barrier) for rank in range(len(inputs))]
    with ThreadPoolExecutor(len(inputs)) as pool:
        return list(pool.map(function, ranks, inputs))


@pytest.mark.parametrize(
    "rows",
    [[[1.0, 2.0, 3.0], [4.0]], [[], [1.0]], [[], []], [[2.0], [], [5.0, 7.0]]],
    ids=["longer-first", "empty-first", "nothing", "three-ranks"],
)
def test_tensors_of_different_lengths_are_joined_in_rank_order_on_every_rank(rows: list[list[float]]) -> None:
    inputs = [torch.tensor(row, dtype=torch.float64) for row in rows]
    for joined in on_ranks(lambda ranks, values: ranks.concat(values), *inputs):
        assert torch.equal(joined, torch.cat(inputs)) and joined.dtype == torch.float64


def test_a_sum_is_that_of_all_ranks_and_bitwise_the_same_on_each() -> None:
    inputs = [torch.tensor([1e16, 0.1]), torch.tensor([1.0, 0.2]), torch.tensor([-1e16, 0.3])]
    found = on_ranks(lambda ranks, values: ranks.sum(values), *inputs)
    assert all(torch.equal(each, torch.stack(inputs).sum(0)) for each in found)


def test_a_maximum_is_that_of_each_place_by_itself() -> None:
    found = on_ranks(lambda ranks, numbers: ranks.maximum(numbers, torch.device("cpu")), [1, 5], [3, 2])
    assert found == [[3, 5]] * 2


def test_alone_a_rank_asks_nobody_even_if_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "process_count", lambda: 4)  # any collective would fail without a group
    values = torch.tensor([1.0, 2.0])
    assert ALONE.ranks == 1 and ALONE.generates
    assert ALONE.sum(values) is values and ALONE.concat(values) is values
    assert [part is values for part in ALONE.gather(values)] == [True]
    assert ALONE.maximum([3, 1], torch.device("cpu")) == [3, 1]
    assert ALONE.objects("one") == ["one"] and ALONE.share("one") == "one"
