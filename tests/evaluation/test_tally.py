"""Figures of a table worked by hand; they depend on neither the order nor the split of the prompts."""

import math

import pytest
import torch

from lightning_rl.evaluation.estimators import interval
from lightning_rl.evaluation.tally import Tally

ROWS = torch.tensor(
    [  # the columns of Tally, then value and count of two rewards
        [4, 4, 0, 4, 1, 4, 0.0, 10, 1, 1.5, 1.5, 4, 0.0, 0],
        [4, 4, 0, 4, 4, 3, 1.0, 8, 0, 4.0, 4.0, 4, 3.0, 2],
        [4, 3, 1, 3, 0, 4, 0.5, 6, 2, 0.3, 0.3, 3, 1.0, 1],
        [4, 0, 3, 0, 0, 4, 0.0, 4, 4, 0.0, 0.0, 0, 0.0, 0],
        [0, 0, 0, 0, 0, 0, 0.0, 0, 0, 0.0, 0.0, 0, 0.0, 0],
        [4, 4, 0, 4, 2, 0, 0.0, 4, 0, 2.0, 2.0, 4, 0.0, 0],
    ],
    dtype=torch.float64,
)
OPTIONS = {"pass_at": (1, 4), "samples": 4, "votes": True}


def tally_of(order: list[int], split: int) -> Tally:
    tally = Tally(6, ["right", "short"])
    for places in (order[:split], order[split:]):
        tally.update(torch.tensor(places, dtype=torch.int64), ROWS[places])
    return tally


def test_figures_by_hand() -> None:
    figures = tally_of([0, 1, 2, 3, 4, 5], 2).figures(**OPTIONS)
    low, high = interval([0.25, 1.0, 0.0, 0.5], 4)
    expected = {
        "pass@1": (0.25 + 1 + 0 + 0.5) / 4, "pass@1_low": low, "pass@1_high": high,
        "pass@4": (1 + 1 + 1) / 3,  # the third prompt has only three samples with a reward
        "avg@4": (0.25 + 1 + 0.5) / 3, "maj@4": (0 + 1) / 2,  # and no answer of the last one could be read
        "reward/task": 7.8 / 15, "reward/right": 7.8 / 15, "reward/short": 4 / 3, "reward/missing": 5 / 20,
        "reward/failed": 4, "answer/failed": 5, "length/mean": 32 / 20, "length/truncated": 7 / 20,
    }  # fmt: skip
    assert {name: figures[name] for name in expected} == pytest.approx(expected, abs=1e-15)
    assert set(figures) == {*expected, *(f"{name}_{end}" for name in ("pass@4", "avg@4", "maj@4") for end in ("low", "high"))}  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [2, 0, 4, 1, 5, 3]])
@pytest.mark.parametrize("split", [0, 1, 3])
def test_figures_depend_on_neither_order_nor_batches(order: list[int], split: int) -> None:
    first = tally_of([0, 1, 2, 3, 4, 5], 2).figures(**OPTIONS)
    assert tally_of(order, split).figures(**OPTIONS) == first


def test_the_sum_of_two_ranks_tables_is_the_table_of_one() -> None:
    halves = []
    for places in ([0, 2, 4], [1, 3, 5]):
        tally = Tally(6, ["right", "short"])
        tally.update(torch.tensor(places), ROWS[places])
        halves.append(tally.table)
    assert torch.equal(halves[0] + halves[1], tally_of([0, 1, 2, 3, 4, 5], 2).table)


def test_an_empty_population_is_nan_under_the_same_names() -> None:
    names = set(tally_of([0, 1, 2, 3, 4, 5], 2).figures(**OPTIONS))
    tally = Tally(6, ["right", "short"])
    tally.update(torch.tensor([3]), ROWS[3:4])
    figures = tally.figures(**OPTIONS)
    known = {"reward/missing": 1.0, "reward/failed": 3, "length/mean": 1.0, "length/truncated": 1.0, "answer/failed": 0}
    assert {name: value for name, value in figures.items() if not math.isnan(value)} == known
    assert set(figures) == names
    for prompts in (6, 0):
        tally = Tally(prompts, ["right", "short"])
        tally.update(torch.zeros(0, dtype=torch.int64), ROWS[:0])
        figures = tally.figures(**OPTIONS)
        assert {name: value for name, value in figures.items() if not math.isnan(value)} == {
            "reward/failed": 0,
            "answer/failed": 0,
        }
        assert set(figures) == names


@pytest.mark.parametrize(
    ("decided", "counts"), [(4, (1, 1, 1, 1)), (3, (1, 0, 0, 0)), (1, (1, 0, 0, 0)), (0, (0,) * 4)]
)
def test_a_prompt_counts_in_a_figure_at_k_if_k_of_its_samples_have_a_score_that_decides(
    decided: int, counts: tuple[int, ...]
) -> None:
    tally = Tally(1, [])
    solved = decided  # every sample with a score is solved, so each figure that counts the prompt is 1
    tally.update(torch.tensor([0]), torch.tensor([[4, 4, 0, decided, solved, 4, 1.0, 4, 0, float(solved)]]))
    figures = tally.figures(pass_at=(1, 4), samples=4, votes=True)
    measured = tuple(int(figures[name] == 1.0) for name in ("pass@1", "pass@4", "avg@4", "maj@4"))
    assert measured == counts
