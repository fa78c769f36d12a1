"""Figures of a table worked by hand; they depend on neither the order nor the split of the prompts."""

import pytest
import torch

from lightning_rl.evaluation.estimators import interval
from lightning_rl.evaluation.tally import Tally

ROWS = torch.tensor(
    [  # samples, rewarded, solved, vote, length, truncated, task, then value and count of two rewards
        [4, 4, 1, 0.0, 10, 1, 1.5, 1.5, 4, 0.0, 0],
        [4, 4, 4, 1.0, 8, 0, 4.0, 4.0, 4, 3.0, 2],
        [4, 3, 0, 0.5, 6, 2, 0.3, 0.3, 3, 1.0, 1],
        [4, 0, 0, 0.0, 4, 4, 0.0, 0.0, 0, 0.0, 0],
        [0, 0, 0, 0.0, 0, 0, 0.0, 0.0, 0, 0.0, 0],
    ],
    dtype=torch.float64,
)
OPTIONS = {"pass_at": (1, 4), "samples": 4, "votes": True}


def tally_of(order: list[int], split: int) -> Tally:
    tally = Tally(5, ["right", "short"])
    for places in (order[:split], order[split:]):
        tally.update(torch.tensor(places, dtype=torch.int64), ROWS[places])
    return tally


def test_figures_by_hand() -> None:
    figures = tally_of([0, 1, 2, 3, 4], 2).figures(**OPTIONS)  # pyright: ignore[reportArgumentType]
    low, high = interval([0.25, 1.0, 0.0], 4)
    expected = {
        "pass@1": (0.25 + 1 + 0) / 3, "pass@1/low": low, "pass@1/high": high,
        "pass@4": (1 + 1) / 2,  # the third prompt has only three samples with a reward
        "avg@4": (0.25 + 1 + 0) / 3, "maj@4": (0 + 1 + 0.5) / 3,
        "reward/task": 5.8 / 11, "reward/right": 5.8 / 11, "reward/short": 4 / 3, "reward/missing": 5 / 16,
        "length/mean": 28 / 16, "length/truncated": 7 / 16,
    }  # fmt: skip
    assert {name: figures[name] for name in expected} == pytest.approx(expected, abs=1e-15)
    assert set(figures) == {*expected, *(f"{name}/{end}" for name in ("pass@4", "avg@4", "maj@4") for end in ("low", "high"))}  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("order", [[4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
@pytest.mark.parametrize("split", [0, 1, 3])
def test_figures_depend_on_neither_order_nor_batches(order: list[int], split: int) -> None:
    first = tally_of([0, 1, 2, 3, 4], 2).figures(**OPTIONS)  # pyright: ignore[reportArgumentType]
    assert tally_of(order, split).figures(**OPTIONS) == first  # pyright: ignore[reportArgumentType]


def test_the_sum_of_two_ranks_tables_is_the_table_of_one() -> None:
    halves = []
    for places in ([0, 2, 4], [1, 3]):
        tally = Tally(5, ["right", "short"])
        tally.update(torch.tensor(places), ROWS[places])
        halves.append(tally.table)
    assert torch.equal(halves[0] + halves[1], tally_of([0, 1, 2, 3, 4], 2).table)


def test_an_empty_population_has_no_figure() -> None:
    tally = Tally(5, ["right", "short"])
    tally.update(torch.tensor([3]), ROWS[3:4])
    assert tally.figures(**OPTIONS) == {"reward/missing": 1.0, "length/mean": 1.0, "length/truncated": 1.0}  # pyright: ignore[reportArgumentType]
    tally = Tally(5, ["right", "short"])
    tally.update(torch.zeros(0, dtype=torch.int64), ROWS[:0])
    assert tally.figures(**OPTIONS) == {}  # pyright: ignore[reportArgumentType]
