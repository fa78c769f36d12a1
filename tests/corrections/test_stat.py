"""Stat: a population's figures do not depend on how it was split, and NaN outside the mask takes no part."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import Stat
from lightning_rl.corrections.stat import StatReduction, merge_moments

NAN, INF = math.nan, math.inf


def shown(stat: Stat, figure: StatReduction) -> float:
    return float(
        {"mean": stat, "max": stat.maximum(), "std": stat.std(), "ess": stat.ess(), "sum": stat.sum()}[figure].value()
    )


@pytest.mark.parametrize(
    ("values", "mask", "mean", "largest", "std", "total"),
    [
        pytest.param([1, 3], [1, 1], 2, 3, math.sqrt(2), 4, id="pair"),
        pytest.param([1, 3, NAN], [1, 1, 0], 2, 3, math.sqrt(2), 4, id="nan-outside"),
        pytest.param([1, 3, INF, -INF], [1, 1, 0, 0], 2, 3, math.sqrt(2), 4, id="infinities-outside"),
        pytest.param([-5], [1], -5, -5, 0, -5, id="one"),
        pytest.param([-5, -7], [1, 1], -6, -5, math.sqrt(2), -12, id="negative-maximum"),
        pytest.param([1.1] * 11, [1] * 11, 1.1, 1.1, 0, 12.1, id="constant"),
        pytest.param([1e8, 1e8 + 1], [1, 1], 1e8 + 0.5, 1e8 + 1, math.sqrt(0.5), 2e8 + 1, id="large-offset"),
    ],
)
def test_hand_worked_populations(
    values: list[float], mask: list[int], mean: float, largest: float, std: float, total: float
) -> None:
    stat = Stat.of(torch.tensor([values], dtype=torch.float64), torch.tensor([mask], dtype=torch.bool))
    found = [shown(stat, figure) for figure in ("mean", "max", "std", "sum")]
    assert found == pytest.approx([mean, largest, std, total], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("figure", ["mean", "max", "std", "ess", "sum"])
@pytest.mark.parametrize("size", [0, 3])
def test_an_empty_population_shows_nan(figure: StatReduction, size: int) -> None:
    stat = Stat.of(torch.ones(size), torch.zeros(size, dtype=torch.bool))
    assert math.isnan(shown(stat, figure))


def test_without_a_mask_everything_counts() -> None:
    assert shown(Stat.of(torch.tensor([True, False, False, False])), "mean") == 0.25
    assert shown(Stat.of(torch.tensor([3, 4])), "sum") == 7


def test_one_number_is_a_population() -> None:
    for number in (2.5, torch.tensor(2.5, requires_grad=True)):
        stat = Stat.single(number)
        assert stat.moments.tolist() == [1, 2.5, 0, 2.5] and not stat.moments.requires_grad


def test_a_nan_inside_the_population_is_shown() -> None:
    stat = Stat.of(torch.tensor([1.0, NAN]))
    assert all(math.isnan(shown(stat, figure)) for figure in ("mean", "max", "std", "ess", "sum"))


@pytest.mark.parametrize(
    ("weights", "share"),
    [
        pytest.param([2.0, 2.0, 2.0], 1.0, id="equal"),
        pytest.param([1.0, 0.0, 0.0, 0.0], 0.25, id="one-of-four"),
        pytest.param([1.0, 3.0], 0.8, id="uneven"),
        pytest.param([5.0], 1.0, id="one"),
    ],
)
def test_effective_share_of_samples(weights: list[float], share: float) -> None:
    tensor = torch.tensor(weights, dtype=torch.float64)
    assert shown(Stat.of(tensor), "ess") == pytest.approx(share)
    assert share == pytest.approx(float(tensor.sum() ** 2 / tensor.square().sum()) / len(weights))


values_and_masks = st.lists(st.tuples(st.floats(-1e6, 1e6), st.booleans(), st.integers(0, 3)), min_size=1, max_size=30)


@given(values_and_masks)
def test_merging_in_any_split_equals_the_whole(entries: list[tuple[float, bool, int]]) -> None:
    values = torch.tensor([value if kept else NAN for value, kept, _ in entries], dtype=torch.float64)
    mask, part = torch.tensor([kept for _, kept, _ in entries]), torch.tensor([number for *_, number in entries])
    whole = Stat.of(values, mask)
    pieces = [Stat.of(values[part == number], mask[part == number]).moments for number in range(4)]
    merged = Stat(merge_moments(torch.stack(pieces)))
    in_two_rounds = torch.stack([merge_moments(torch.stack(pieces[:3])), pieces[3]])
    for figure in ("mean", "max", "std", "ess", "sum"):
        expected = pytest.approx(shown(whole, figure), rel=1e-9, abs=1e-6, nan_ok=True)
        assert shown(merged, figure) == expected
        assert shown(Stat(merge_moments(in_two_rounds)), figure) == expected


def test_merging_keeps_precision_at_a_large_offset() -> None:
    values = torch.arange(100, dtype=torch.float64) + 1e9
    pieces = torch.stack([Stat.of(part).moments for part in values.split(7)])
    assert float(Stat(merge_moments(pieces), "std").value()) == pytest.approx(
        float(torch.arange(100.0).std()), rel=1e-6
    )


def test_many_are_merged_at_once() -> None:
    parts = torch.stack(
        [torch.stack([Stat.single(float(a)).moments, Stat.single(float(-a)).moments]) for a in range(3)]
    )
    found = merge_moments(parts)
    assert found.shape == (2, 4)
    assert found[:, 1].tolist() == [1.0, -1.0] and found[:, 0].tolist() == [3.0, 3.0]


def test_merging_nothing_but_empty_populations_is_empty() -> None:
    empty = Stat.of(torch.zeros(0)).moments
    assert math.isnan(float(Stat(merge_moments(torch.stack([empty, empty]))).value()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_many_equals_one_by_one_in_any_dtype_and_carries_no_gradient(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {name: (torch.rand(3, 4, generator=draw) * 4).to(dtype) for name in "abc"}
    tensors["trained"] = torch.rand(3, 4, generator=draw, dtype=torch.float64).requires_grad_()
    mask = torch.rand(3, 4, generator=draw) > 0.4
    for name, stat in Stat.many(tensors, mask).items():
        assert_close(stat.moments, Stat.of(tensors[name], mask).moments)
        assert stat.moments.dtype == torch.float64 and not stat.moments.requires_grad
