"""Gradients at corners: the same in every version of torch, for each primitive and for each formula that has one."""

import math
from collections.abc import Callable

import pytest
import torch
from kit.losses import loss_of
from kit.support import view_of
from torch import Tensor

from lightning_rl import GMPO, ClippedSurrogate, KLCov, ValueLoss
from lightning_rl.signal.importance_ratios import policy_ratio
from lightning_rl.signal.kl import Clamped, absolute, binary_kl, k1, k2, k3, tangent_expm1
from lightning_rl.signal.subgradients import absolute_value, clamp, maximum, minimum

NAN, INF = math.nan, math.inf
POINTS = [-INF, -2.0, -1.0, 0.0, 1.0, 2.0, INF, NAN]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def slope(function: Callable[[Tensor], Tensor], points: list[float], dtype: torch.dtype) -> tuple[Tensor, list[float]]:
    """Return the values of a function of [1, N] numbers, and its derivative at each."""
    variable = torch.tensor([points], dtype=dtype, requires_grad=True)
    value = function(variable)
    (gradient,) = torch.autograd.grad(value.sum(), variable)
    return value.detach(), gradient[0].tolist()


@DTYPES
@pytest.mark.parametrize(
    ("function", "reference", "slopes"),
    [
        pytest.param(lambda x: clamp(x, -1, 1), lambda x: x.clamp(-1, 1), [0, 0, 1, 1, 1, 0, 0, 0], id="clamp"),
        pytest.param(lambda x: clamp(x, low=-1), lambda x: x.clamp(-1), [0, 0, 1, 1, 1, 1, 1, 0], id="clamp-below"),
        pytest.param(lambda x: clamp(x, high=1), lambda x: x.clamp(max=1), [1, 1, 1, 1, 1, 0, 0, 0], id="clamp-above"),
        pytest.param(lambda x: clamp(x, 1, 1), lambda x: x.clamp(1, 1), [0, 0, 0, 0, 1, 0, 0, 0], id="clamp-to-one"),
        pytest.param(lambda x: clamp(x, -INF, INF), lambda x: x, [1, 1, 1, 1, 1, 1, 1, 0], id="clamp-without-bounds"),
        pytest.param(absolute_value, torch.abs, [-1, -1, -1, 0, 1, 1, 1, 0], id="absolute-value"),
    ],
)
def test_primitives_of_one_tensor(
    function: Callable[[Tensor], Tensor],
    reference: Callable[[Tensor], Tensor],
    slopes: list[float],
    dtype: torch.dtype,
) -> None:
    value, found = slope(function, POINTS, dtype)
    torch.testing.assert_close(value, reference(torch.tensor([POINTS], dtype=dtype)), rtol=0, atol=0, equal_nan=True)
    assert found == slopes


@DTYPES
def test_a_bound_has_the_dtype_of_the_values(dtype: torch.dtype) -> None:
    assert slope(lambda x: clamp(x, 0.8, 1.2), [0.8, 1.2, 1.2000002], dtype)[1] == [1, 1, 0]


@DTYPES
@pytest.mark.parametrize(("function", "reference"), [(maximum, torch.maximum), (minimum, torch.minimum)])
def test_each_side_of_a_tie_has_half_of_the_gradient(
    function: Callable[[Tensor, Tensor], Tensor], reference: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    one, other = (grid.flatten() for grid in torch.meshgrid(*[torch.tensor(POINTS, dtype=dtype)] * 2, indexing="ij"))
    one.requires_grad_(), other.requires_grad_()
    value = function(one, other)
    torch.testing.assert_close(value, reference(one, other), rtol=0, atol=0, equal_nan=True)
    first, second = torch.autograd.grad(value.sum(), (one, other))
    numbers = ~(one.isnan() | other.isnan())
    chosen = torch.where(one == other, 0.5, (one == value).to(dtype))
    assert torch.equal(first[numbers], chosen[numbers])
    assert torch.equal(second[numbers], 1 - chosen[numbers])


def surrogate(advantage: float, **options: float) -> Callable[[Tensor], Tensor]:
    loss = ClippedSurrogate(**options)
    return lambda ratio: loss.surrogate(ratio, torch.full_like(ratio, advantage))


def value_loss(target: float, loss: ValueLoss) -> Callable[[Tensor], Tensor]:
    return lambda values: loss(values, torch.zeros_like(values), torch.full_like(values, target))


def gmpo(advantage: float, low: float, high: float) -> Callable[[Tensor], Tensor]:
    loss = GMPO(clip_low=low, clip_high=high)
    return lambda new: loss_of(loss, new, torch.zeros_like(new), torch.full_like(new, advantage))


def kl_cov(new: Tensor) -> Tensor:
    same, view = torch.zeros_like(new), view_of([[0.0]], dtype=new.dtype)
    chosen = view.replace(prepared=torch.ones_like(view.valid_tokens))
    return KLCov()(chosen.replace(logprobs=new, old_logprobs=same, advantages=same + 2))


def kl_of(estimator: Callable[[Tensor, Tensor], Tensor], other: float) -> Callable[[Tensor], Tensor]:
    return lambda new: estimator(new, torch.full_like(new, other))


SMALL, ALMOST_ONE, HALF = math.log(1e-8), math.log1p(-1e-8), math.log(0.5)
SLOPE = ALMOST_ONE - SMALL  # of the binary KL from a probability of one half, divided by the probability
BINARY_KL = 1e-8 * (SMALL - HALF) + (1 - 1e-8) * (ALMOST_ONE - HALF)


@pytest.mark.parametrize(
    ("function", "point", "value", "expected"),
    [
        pytest.param(kl_of(policy_ratio, 0), 20, math.exp(20), math.exp(20), id="ratio-at-its-upper-bound"),
        pytest.param(kl_of(policy_ratio, 0), -20, math.exp(-20), math.exp(-20), id="ratio-at-its-lower-bound"),
        pytest.param(kl_of(policy_ratio, 0), 20.25, math.exp(20), 0, id="ratio-beyond"),
        pytest.param(tangent_expm1, 20, math.expm1(20), math.exp(20), id="exponential-where-the-tangent-begins"),
        pytest.param(kl_of(k3, 0), -20, math.expm1(20) - 20, 1 - math.exp(20), id="k3-where-the-tangent-begins"),
        pytest.param(kl_of(absolute, 0.25), 0.25, 0, 0, id="abs-of-equal-policies"),
        pytest.param(kl_of(binary_kl, HALF), SMALL, BINARY_KL, -1e-8 * SLOPE, id="smallest-probability"),
        pytest.param(kl_of(binary_kl, HALF), ALMOST_ONE, BINARY_KL, (1 - 1e-8) * SLOPE, id="largest-probability"),
        pytest.param(kl_of(Clamped(k1, value=0.5), 0), 0.5, 0.5, 1, id="clamped-value-at-its-upper-bound"),
        pytest.param(kl_of(Clamped(k1, value=0.5), 0), -0.5, -0.5, 1, id="clamped-value-at-its-lower-bound"),
        pytest.param(kl_of(Clamped(k2, log_ratio=0.5), 0), 0.5, 0.125, 0.5, id="clamped-log-ratio-at-its-bound"),
        pytest.param(kl_of(Clamped(k2, log_ratio=0.5), 0), -0.75, 0.125, 0, id="clamped-log-ratio-beyond"),
        pytest.param(surrogate(2.0), 1, -2, -2, id="surrogate-on-policy"),
        pytest.param(surrogate(1.0, clip_high=0.5), 1.5, -1.5, -1, id="surrogate-at-its-upper-bound"),
        pytest.param(surrogate(-1.0, clip_high=0.5), 1.5, 1.5, 1, id="surrogate-at-its-upper-bound-bad"),
        pytest.param(surrogate(-1.0, clip_low=0.25), 0.75, 0.75, 1, id="surrogate-at-its-lower-bound"),
        pytest.param(surrogate(1.0, clip_low=0.25), 0.75, -0.75, -1, id="surrogate-at-its-lower-bound-good"),
        pytest.param(surrogate(1.0, clip_low=0, clip_high=0), 1, -1, -1, id="surrogate-without-room"),
        pytest.param(surrogate(-1.0, clip_low=0, clip_high=0), 1, 1, 1, id="surrogate-without-room-bad"),
        pytest.param(surrogate(0.0), 2, 0, 0, id="surrogate-without-advantage"),
        pytest.param(surrogate(-2.0, dual_clip=1.5), 1.5, 3, 1, id="dual-clip-meets-the-surrogate"),
        pytest.param(gmpo(1.0, 0.25, 0.5), 0.5, -math.exp(0.5), -math.exp(0.5), id="gmpo-at-its-upper-bound"),
        pytest.param(gmpo(-1.0, 0.25, 0.5), -0.25, math.exp(-0.25), math.exp(-0.25), id="gmpo-at-its-lower-bound"),
        pytest.param(gmpo(1.0, 0, 0), 0, -1, -1, id="gmpo-without-room"),
        pytest.param(gmpo(1.0, 0.25, 0.5), 0.75, -math.exp(0.5), 0, id="gmpo-beyond"),
        pytest.param(kl_cov, 0, -2, -2, id="kl-cov-on-policy"),
        pytest.param(value_loss(1.0, ValueLoss(clip=0.25)), 0.25, 0.28125, -0.75, id="value-at-its-upper-bound"),
        pytest.param(value_loss(-1.0, ValueLoss(clip=0.25)), -0.25, 0.28125, 0.75, id="value-at-its-lower-bound"),
        pytest.param(value_loss(1.0, ValueLoss(clip=0.5)), 1.5, 0.125, 0.25, id="plain-and-clipped-error-are-equal"),
        pytest.param(value_loss(0.0, ValueLoss(clip=0.25)), 0, 0, 0, id="value-is-right"),
        pytest.param(
            value_loss(0.0, ValueLoss(clip=None, huber=0.5)), 0.5, 0.125, 0.5, id="error-at-the-bound-of-huber"
        ),
        pytest.param(
            value_loss(0.0, ValueLoss(clip=None, huber=0.5)), -0.5, 0.125, -0.5, id="error-at-the-lower-bound-of-huber"
        ),
    ],
)
def test_formulas_at_their_corners(
    function: Callable[[Tensor], Tensor], point: float, value: float, expected: float
) -> None:
    found, (gradient,) = slope(function, [point], torch.float64)
    assert [found.item(), gradient] == pytest.approx([value, expected], rel=1e-9)
