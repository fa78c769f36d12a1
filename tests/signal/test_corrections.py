"""Importance weights and rejection rules as pure functions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lightning_rl.signal.corrections import adapted_coefficient, clipped_weight, drifted_and_bad, overlong_penalty

NAN, INF = math.nan, math.inf


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


def test_weight_has_no_gradient() -> None:
    numerator, denominator = torch.zeros(1, 2, requires_grad=True), torch.zeros(1, 2, requires_grad=True)
    assert not clipped_weight(numerator, denominator, minimum=0.0, maximum=2.0).requires_grad


@given(st.floats(-1e4, 1e4, width=32), st.floats(-1e4, 1e4, width=32))
def test_weight_stays_within_its_bounds_and_cannot_overflow(numerator: float, denominator: float) -> None:
    found = clipped_weight(torch.tensor([[numerator]]), torch.tensor([[denominator]]), minimum=0.5, maximum=3.0)
    assert 0.5 <= found.item() <= 3.0


def test_weight_without_an_upper_bound_is_still_finite() -> None:
    found = clipped_weight(torch.tensor([[1e4]]), torch.tensor([[-1e4]]), minimum=0.0, maximum=INF)
    assert_close(found, torch.tensor([[math.exp(20)]]))


@pytest.mark.parametrize(
    ("drift", "advantages", "valid", "marked"),
    [
        pytest.param([1.0, 1.0, 1.0], [-0.5, 0.25, -0.25], [1, 1, 1], True, id="opsm-witness"),
        pytest.param([0.75, 0.75], [-1.0, -1.0], [1, 1], True, id="above-delta"),
        pytest.param([0.5, 0.5], [-1.0, -1.0], [1, 1], False, id="exactly-delta"),
        pytest.param([0.75, 0.75], [0.0, 0.0], [1, 1], False, id="neutral"),
        pytest.param([0.75, 0.75], [1.0, 1.0], [1, 1], False, id="good"),
        pytest.param([-9.0, -9.0], [-1.0, -1.0], [1, 1], False, id="likelier-now"),
        pytest.param([1.5, 0.0], [-1.0, -1.0], [1, 1], True, id="mean-drift-not-minimum"),
        pytest.param([0.9, 0.0], [-1.0, -1.0], [1, 1], False, id="mean-drift-not-maximum"),
        pytest.param([0.75, 0.75], [-3.0, 1.0], [1, 1], True, id="mean-advantage-negative"),
        pytest.param([0.75, 0.75], [-1.0, 3.0], [1, 1], False, id="mean-advantage-positive"),
        pytest.param([0.75, -INF], [-1.0, NAN], [1, 0], True, id="poison-does-not-rescue"),
        pytest.param([0.4, 9.0], [-1.0, -9.0], [1, 0], False, id="padding-does-not-condemn"),
        pytest.param([1.0, 0.0], [-1.0, 0.0], [1, 0], True, id="padding-does-not-dilute"),
        pytest.param([9.0, 9.0], [-9.0, -9.0], [0, 0], False, id="no-valid-token"),
    ],
)
def test_marks_rows_that_drifted_and_are_bad(
    drift: list[float], advantages: list[float], valid: list[int], marked: bool
) -> None:
    found = drifted_and_bad(
        torch.tensor([drift]), torch.tensor([advantages]), torch.tensor([valid], dtype=torch.bool), delta=0.5
    )
    assert found.tolist() == [marked]


def test_order_of_tokens_within_a_row_does_not_matter() -> None:
    draw = torch.Generator().manual_seed(0)
    drift, advantages = torch.randn(2, 50, 5, generator=draw, dtype=torch.float64).unbind()
    valid = torch.rand(50, 5, generator=draw) > 0.3
    order = torch.tensor([3, 1, 4, 0, 2])
    marked = drifted_and_bad(drift, advantages, valid, delta=0.1)
    assert 0 < marked.sum() < 50
    assert torch.equal(drifted_and_bad(drift[:, order], advantages[:, order], valid[:, order], delta=0.1), marked)


def test_the_decision_carries_no_gradient_and_accepts_no_rows() -> None:
    drift = torch.ones(1, 2, requires_grad=True)
    valid = torch.ones(1, 2, dtype=torch.bool)
    assert not drifted_and_bad(drift, -torch.ones(1, 2), valid, delta=0.5).requires_grad
    nothing = torch.zeros(0, 2)
    assert drifted_and_bad(nothing, nothing, nothing.bool(), delta=0.5).shape == (0,)


@pytest.mark.parametrize(
    ("measured", "number", "expected"),
    [
        pytest.param(0.1, 100, 0.5, id="on-target"),
        pytest.param(0.11, 100, 0.55, id="a-little-above"),
        pytest.param(0.09, 100, 0.45, id="a-little-below"),
        pytest.param(9.0, 100, 0.6, id="at-most-a-fifth-up"),
        pytest.param(0.0, 100, 0.4, id="at-most-a-fifth-down"),
        pytest.param(-9.0, 100, 0.4, id="an-estimate-below-0"),
        pytest.param(9.0, 50, 0.55, id="half-a-horizon"),
        pytest.param(9.0, 0, 0.5, id="no-sample"),
        pytest.param(0.0, 1000, 0.0, id="many-samples-never-turn-it-negative"),
    ],
)
def test_the_coefficient_moves_towards_its_target(measured: float, number: int, expected: float) -> None:
    found = adapted_coefficient(0.5, measured, target=0.1, number=number, horizon=100)
    assert found == pytest.approx(expected)


def test_a_coefficient_of_0_stays_there() -> None:
    assert adapted_coefficient(0.0, 9.0, target=0.1, number=100, horizon=100) == 0.0


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (101, -1)])
def test_the_overlong_penalty_falls_within_its_cache(length: int, penalty: float) -> None:
    found = overlong_penalty(torch.tensor([length]), longest=100, cache=20)
    assert found.item() == pytest.approx(penalty)
    assert torch.equal(overlong_penalty(torch.tensor([length]), longest=100, cache=20), found)
