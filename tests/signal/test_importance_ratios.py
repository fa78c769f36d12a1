"""Importance ratios of tokens and of rows."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.support import view_of
from torch.testing import assert_close

from lightning_rl import RLCallback
from lightning_rl.callbacks import IcePop, OutlierMask, SequenceRatioMask
from lightning_rl.corrections import Corrections
from lightning_rl.signal.importance_ratios import (
    LOG_RATIO_BOUND,
    clipped_weight,
    policy_ratio,
    sequence_log_ratio,
    sequence_ratio,
    within_band,
)

NAN, INF = math.nan, math.inf
NEW = torch.tensor([[-1.0, -2.0, NAN], [-1.0, 9.0, -1.0], [NAN, NAN, INF]], dtype=torch.float64)
OLD = torch.tensor([[-1.5, -2.25, 0.0], [-0.5, -INF, -1.0], [0.0, 1.0, 2.0]], dtype=torch.float64)
VALID = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize(("geometric", "expected"), [(False, [0.75, -0.5, 0.0]), (True, [0.375, -0.25, 0.0])])
def test_the_log_ratio_of_a_row_is_that_of_its_valid_tokens(*, geometric: bool, expected: list[float]) -> None:
    found = sequence_log_ratio(NEW, OLD, VALID, geometric=geometric)
    assert found.tolist() == expected
    assert sequence_ratio(NEW, OLD, VALID, geometric=geometric).tolist() == pytest.approx(
        [math.exp(e) for e in expected]
    )


def test_the_log_ratio_carries_a_gradient_and_the_ratio_none() -> None:
    current = NEW.clone().requires_grad_()
    (slope,) = torch.autograd.grad(sequence_log_ratio(current, OLD, VALID, geometric=True).sum(), current)
    assert slope.tolist() == [[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]
    assert not sequence_ratio(current, OLD, VALID, geometric=True).requires_grad


@pytest.mark.parametrize("bound", [LOG_RATIO_BOUND, 1.0, INF])
def test_the_exponent_of_a_token_is_bounded_on_either_side(bound: float) -> None:
    gap = torch.tensor([-30.0, -0.5, 0.0, 0.5, 30.0], dtype=torch.float64, requires_grad=True)
    found = policy_ratio(gap, torch.zeros(5).double(), bound=bound)
    assert_close(found, gap.detach().clamp(-bound, bound).exp())
    (slope,) = torch.autograd.grad(found.sum(), gap)
    inside = gap.detach().abs() <= bound
    assert_close(slope, torch.where(inside, found.detach(), 0.0))


def test_a_long_row_overflows_neither_product_nor_mean() -> None:
    new, old = torch.zeros(1, 5000), torch.full((1, 5000), -1.0)
    valid = torch.ones(1, 5000, dtype=torch.bool)
    assert_close(sequence_ratio(new, old, valid, geometric=False), torch.tensor([math.exp(LOG_RATIO_BOUND)]))
    assert_close(sequence_ratio(new, old, valid, geometric=True), torch.tensor([math.e]))


@pytest.mark.parametrize(
    ("ratios", "minimum", "maximum", "weights"),
    [
        pytest.param([2.0, 0.5, 1.0], 0.8, 2.0, [2.0, 0.8, 1.0], id="two-sided"),
        pytest.param([10.0, 0.01], 0.0, 5.0, [5.0, 0.01], id="single-sided"),
        pytest.param([1.49182, 0.81873, 1.82212, 0.60653], 0.8, 1.2, [1.2, 0.81873, 1.2, 0.8], id="cispo-witness"),
        pytest.param([1.0], 1.0, 1.0, [1.0], id="no-room"),
    ],
)
def test_weight_is_the_clipped_ratio(ratios: list[float], minimum: float, maximum: float, weights: list[float]) -> None:
    numerator = torch.tensor([ratios]).log()
    found = clipped_weight(numerator, torch.zeros_like(numerator), minimum=minimum, maximum=maximum)
    assert_close(found, torch.tensor([weights]))


@given(st.floats(-1e4, 1e4, width=32), st.floats(-1e4, 1e4, width=32))
def test_weight_stays_within_its_bounds_and_cannot_overflow(numerator: float, denominator: float) -> None:
    found = clipped_weight(torch.tensor([[numerator]]), torch.tensor([[denominator]]), minimum=0.5, maximum=3.0)
    assert 0.5 <= found.item() <= 3.0


@pytest.mark.parametrize(
    ("log_ratio", "low", "high", "inside"),
    [
        pytest.param(25.0, 0.0, 1e10, False, id="above-a-huge-bound"),
        pytest.param(25.0, 0.0, 1e11, True, id="below-it"),
        pytest.param(-80.0, 1e-30, 2.0, False, id="below-a-tiny-bound"),
        pytest.param(-INF, 0.0, INF, True, id="no-bounds"),
        pytest.param(math.log(0.5), 0.5, 2.0, True, id="at-a-bound"),
        pytest.param(NAN, 0.0, INF, False, id="nan"),
    ],
)
def test_a_band_decides_on_the_exact_ratio(log_ratio: float, low: float, high: float, *, inside: bool) -> None:
    assert within_band(torch.tensor([log_ratio]), low, high).tolist() == [inside]


@pytest.mark.parametrize(
    "correction",
    [
        IcePop(0.0, 1e10),
        OutlierMask(0.0, 1e10),
        *(SequenceRatioMask(by, 0.0, 1e10) for by in ("geometric", "product", "max")),
    ],
)
def test_masks_compare_logarithms(correction: RLCallback) -> None:
    view = view_of([[-1.0], [-1.0]], old_logprobs=[[-1.0], [-1.0]], rollout_logprobs=[[-26.0], [-22.0]])
    factor = Corrections([correction]).policy_factor(view).factor
    assert factor is not None and factor.tolist() == [[0.0], [1.0]]
