"""Masked statistics: what lies outside the mask, NaN and infinity included, reaches neither value nor gradient."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.support import in_lockstep
from torch.testing import assert_close

from lightning_rl.signal.masked import (
    global_moments,
    group_index,
    last_true,
    masked_fill_invalid,
    row_mean,
    whiten,
)

NAN, INF = math.nan, math.inf
HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("values", "mask", "mean", "slope"),
    [
        pytest.param([1.0, 3.0], [True, True], 2.0, [0.5, 0.5], id="all"),
        pytest.param([1.0, 9.0, 3.0], [True, False, True], 2.0, [0.5, 0.0, 0.5], id="hole"),
        pytest.param([4.0, NAN], [True, False], 4.0, [1.0, 0.0], id="nan-outside"),
        pytest.param([4.0, INF, -INF], [True, False, False], 4.0, [1.0, 0.0, 0.0], id="infinities-outside"),
        pytest.param([NAN, NAN], [False, False], 0.0, [0.0, 0.0], id="nothing-inside"),
        pytest.param([], [], 0.0, [], id="empty"),
    ],
)
def test_row_mean_is_the_mean_over_the_mask(
    values: list[float], mask: list[bool], mean: float, slope: list[float]
) -> None:
    entries = torch.tensor([values], requires_grad=True)
    found = row_mean(entries, torch.tensor([mask], dtype=torch.bool))
    (gradient,) = torch.autograd.grad(found.sum(), entries)
    assert found.tolist() == [mean]
    assert gradient.tolist() == [slope]


def test_a_number_inside_the_mask_is_not_hidden_even_if_it_is_nan() -> None:
    assert row_mean(torch.tensor([[NAN, 1.0]]), torch.tensor([[True, True]])).isnan().all()


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_no_gradient_leaks_from_a_masked_place_through_a_function_before_the_mask(poison: float) -> None:
    entries = torch.tensor([0.5, poison], requires_grad=True)
    mask = torch.tensor([True, False])
    masked_fill_invalid(entries, mask).exp().sum().backward()  # the mask comes first: afterwards 0 * nan is nan
    assert_close(entries.grad, torch.tensor([math.exp(0.5), 0.0]))


def test_fill_replaces_what_is_masked() -> None:
    assert masked_fill_invalid(torch.tensor([1.0, NAN]), torch.tensor([True, False]), fill=7.0).tolist() == [1.0, 7.0]


@pytest.mark.parametrize(
    ("mask", "last"),
    [
        pytest.param([1, 1, 1], [0, 0, 1], id="full"),
        pytest.param([1, 1, 0], [0, 1, 0], id="padded"),
        pytest.param([1, 0, 1], [0, 0, 1], id="hole"),
        pytest.param([1, 0, 0], [1, 0, 0], id="first"),
        pytest.param([0, 1, 0], [0, 1, 0], id="starts-late"),
        pytest.param([0, 0, 0], [0, 0, 0], id="none"),
        pytest.param([], [], id="no-tokens"),
    ],
)
def test_last_true_marks_one_entry_or_none(mask: list[int], last: list[int]) -> None:
    assert last_true(torch.tensor([mask], dtype=torch.bool)).int().tolist() == [last]


@pytest.mark.parametrize(
    ("values", "mask", "whitened"),
    [
        pytest.param([1.0, 3.0], [True, True], [-HALF, HALF], id="pair"),
        pytest.param([1.0, NAN, 3.0], [True, False, True], [-HALF, 0.0, HALF], id="nan-outside"),
        pytest.param([1.0, INF, 3.0], [True, False, True], [-HALF, 0.0, HALF], id="infinity-outside"),
        pytest.param([1.0, 3.0, 0.0, 0.0], [True, True, False, False], [-HALF, HALF, 0, 0], id="padding-takes-no-part"),
        pytest.param([1.1] * 11, [True] * 11, [0.0] * 11, id="constant"),
        pytest.param([2.7] * 1000, [True] * 1000, [0.0] * 1000, id="constant-of-a-thousand"),
        pytest.param([5.0], [True], [0.0], id="one"),
        pytest.param([5.0, 7.0], [False, False], [0.0, 0.0], id="none"),
        pytest.param([1000.0, 1000.01], [True, True], [-HALF, HALF], id="large-offset"),
        pytest.param([0.0, 1e-12], [True, True], [-HALF, HALF], id="small-scale"),
    ],
)
def test_whiten_has_mean_0_and_deviation_1_over_the_mask(
    values: list[float], mask: list[bool], whitened: list[float]
) -> None:
    found = whiten(torch.tensor([values]), torch.tensor([mask]))
    assert found.dtype == torch.float32
    assert_close(found, torch.tensor([whitened]), atol=1e-6, rtol=0)
    assert torch.count_nonzero(found) == sum(value != 0 for value in whitened)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("constant", [1.1, -0.1, 1e6 + 0.1, 1e-8])
@pytest.mark.parametrize("number", [2, 11, 1000])
def test_equal_values_whiten_to_exactly_0(dtype: torch.dtype, constant: float, number: int) -> None:
    values = torch.full((1, number), constant, dtype=dtype)
    assert whiten(values, torch.ones_like(values, dtype=torch.bool)).count_nonzero() == 0


@pytest.mark.parametrize("poison", [NAN, INF])
def test_whiten_does_not_take_a_broken_population_for_a_constant_one(poison: float) -> None:
    values = torch.tensor([[1.0, poison, 3.0]])
    assert not whiten(values, torch.ones(1, 3, dtype=torch.bool)).isfinite().all()


@given(
    scale=st.floats(0.01, 100) | st.floats(-100, -0.01),
    shift=st.floats(-1e4, 1e4),
    values=st.lists(st.integers(-50, 50), min_size=3, max_size=8).filter(lambda found: len(set(found)) > 1),
)
def test_whiten_follows_scale_and_shift(scale: float, shift: float, values: list[int]) -> None:
    plain = torch.tensor([values], dtype=torch.float64)
    mask = torch.ones_like(plain, dtype=torch.bool)
    assert_close(whiten(plain * scale + shift, mask), math.copysign(1, scale) * whiten(plain, mask), atol=1e-7, rtol=0)


def test_ranks_whiten_with_the_statistics_of_all() -> None:
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(6, 5, generator=draw) + 100
    mask = torch.rand(6, 5, generator=draw) > 0.3
    parts = [slice(0, 1), slice(1, 1), slice(1, 6)]  # one rank has no rows
    found = in_lockstep(*[lambda total, own=own: whiten(values[own], mask[own], total) for own in parts])
    assert_close(torch.cat(found), whiten(values, mask), atol=1e-6, rtol=0)
    assert all((row == 0).all() for row in torch.cat(found)[~mask])


def test_groups_are_numbered_whatever_their_ids() -> None:
    index, number = group_index(torch.tensor([7, -1, 7, 10**12]))
    assert (index.tolist(), number) == ([1, 0, 1, 2], 3)


def test_global_moments_by_hand() -> None:
    found = global_moments(torch.tensor([1.0, NAN, 4.0, 7.0]), torch.tensor([True, False, True, True]))
    assert (found.number.item(), found.mean.item(), found.squares.item()) == (3.0, 4.0, 18.0)
    assert found.deviation.tolist() == [-3.0, 0.0, 0.0, 3.0] and found.spread.item()
    assert (found.std().item(), found.std(unbiased=False).item()) == pytest.approx((3.0, math.sqrt(6.0)))
    assert all(field.dtype == torch.float64 for field in found[:4])


@pytest.mark.parametrize(
    ("values", "spread"),
    [([1.1] * 11, False), ([5.0], False), ([], False), ([1000.0, 1000.01], True), ([1.0, NAN], True)],
)
def test_global_moments_say_whether_values_differ(values: list[float], *, spread: bool) -> None:
    found = global_moments(torch.tensor(values), torch.ones(len(values), dtype=torch.bool))
    assert found.spread.item() == spread
    assert spread or found.std().item() == 0


def test_moments_of_ranks_are_those_of_all_and_deviations_stay_at_home() -> None:
    values, mask = torch.tensor([1.0, 9.0, 4.0, 7.0]), torch.tensor([True, False, True, True])
    parts = [slice(0, 1), slice(1, 2), slice(2, 4)]
    deviations = in_lockstep(*[lambda t, own=own: global_moments(values[own], mask[own], t).deviation for own in parts])
    assert torch.equal(torch.cat(deviations), global_moments(values, mask).deviation)
    squares = in_lockstep(*[lambda t, own=own: global_moments(values[own], mask[own], t).squares for own in parts])
    assert {one.item() for one in squares} == {18.0}


@pytest.mark.parametrize(
    ("options", "whitened"),
    [
        pytest.param({}, [-HALF, HALF], id="defaults"),
        pytest.param({"shifted": False}, [3 - HALF, 3 + HALF], id="the-mean-stays"),
        pytest.param({"unbiased": False}, [-1.0, 1.0], id="over-n"),
        pytest.param(
            {"epsilon": 1.0}, [-1 / (1 + math.sqrt(2)), 1 / (1 + math.sqrt(2))], id="epsilon-on-the-deviation"
        ),
    ],
)
def test_options_of_whiten(options: dict[str, Any], whitened: list[float]) -> None:
    found = whiten(torch.tensor([[2.0, 4.0, NAN]]), torch.tensor([[True, True, False]]), **options)
    assert_close(found, torch.tensor([[*whitened, 0.0]]))


def test_a_constant_keeps_its_mean_unshifted_and_is_0_shifted() -> None:
    values, mask = torch.full((1, 3), 1.1), torch.tensor([[True, True, False]])
    assert_close(whiten(values, mask, shifted=False), torch.tensor([[1.1, 1.1, 0.0]]))
    assert not whiten(values, mask, epsilon=1.0).any()
