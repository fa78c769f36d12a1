"""GSPO and GMPO as pure functions: numbers by hand, masked tokens, shapes and bounds that are refused."""

import math
from collections.abc import Callable

import pytest
import torch
from kit.losses import loss_of
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import GMPO, GSPO, PolicyLoss

NAN = math.nan
OLD = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, -1.0, -1.0]], dtype=torch.float64)
GAPS = torch.tensor([[0.3, -0.1, NAN], [-0.2, 0.0, -0.4]], dtype=torch.float64)
VALID = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool)
GOOD = torch.tensor([[1.0, 1.0, NAN], [-2.0, -2.0, -2.0]], dtype=torch.float64)


def with_slope(loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    leaf = torch.where(VALID, OLD + GAPS, 0.0).requires_grad_()
    value = torch.where(VALID, loss(leaf), 0.0)
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


def clean(tensor: Tensor) -> Tensor:
    return torch.where(VALID, tensor, 0.0)


@pytest.mark.parametrize("per_token", [False, True])
def test_gspo_by_hand(*, per_token: bool) -> None:
    ratios = [math.exp(0.1), math.exp(-0.2)]
    free = {"clip_low": 1.0, "clip_high": 1.0, "per_token": per_token}
    value, slope = with_slope(lambda new: loss_of(GSPO(**free), new, OLD, clean(GOOD), VALID))
    expected = torch.tensor([[-ratios[0]] * 2 + [0], [2 * ratios[1]] * 3], dtype=torch.float64)
    assert_close(value, expected)
    assert_close(slope, expected)  # each of n tokens gets n times one n-th of the row's slope


def test_gspo_clips_the_row_and_not_the_token() -> None:
    value, slope = with_slope(lambda new: loss_of(GSPO(clip_low=0.1, clip_high=0.2), new, OLD, clean(GOOD), VALID))
    inside, clipped = -math.exp(0.1), 2 * 0.9  # exp(-.2) is below .9, and its advantage bad
    assert_close(value, torch.tensor([[inside, inside, 0.0], [clipped] * 3], dtype=torch.float64))
    assert_close(slope, torch.tensor([[inside, inside, 0.0], [0.0] * 3], dtype=torch.float64))


def test_gmpo_clips_the_token_and_then_takes_the_mean() -> None:
    value, slope = with_slope(lambda new: loss_of(GMPO(clip_low=0.25, clip_high=0.25), new, OLD, clean(GOOD), VALID))
    first, second = -math.exp((0.25 - 0.1) / 2), 2 * math.exp((-0.2 + 0.0 - 0.25) / 3)
    assert_close(value, torch.tensor([[first, first, 0.0], [second] * 3], dtype=torch.float64))
    assert_close(slope, torch.tensor([[0.0, first, 0.0], [second, second, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize("loss", [GSPO(), GMPO()])
def test_a_masked_token_reaches_no_valid_one(loss: PolicyLoss) -> None:
    leaf = (OLD + GAPS).requires_grad_()  # NaN at the masked token, in the advantage too
    value = loss_of(loss, leaf, OLD, GOOD, VALID)
    other = loss_of(loss, (OLD + GAPS).nan_to_num(3.0), OLD, GOOD.nan_to_num(), VALID)
    assert torch.equal(value[VALID].detach(), other[VALID])


@pytest.mark.parametrize("loss", [GSPO(), GMPO()])
def test_a_row_without_a_valid_token_is_no_error(loss: PolicyLoss) -> None:
    leaf = torch.zeros(2, 3, requires_grad=True)
    value = loss_of(loss, leaf, torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    assert value.isfinite().all() and torch.autograd.grad(value.sum(), leaf)[0].isfinite().all()


@pytest.mark.parametrize("loss", [GSPO(), GMPO()])
def test_shapes_that_would_broadcast_are_refused_by_name(loss: PolicyLoss) -> None:
    with pytest.raises(ValueError, match=r"expected advantages of shape \[2, 3\], got \[2, 1\]"):
        loss_of(loss, OLD, OLD, GOOD[:, :1], VALID)


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (GSPO, {"clip_low": -1e-9}, r"clip_low in \[0, 1\]"),
        (GSPO, {"clip_high": NAN}, "clip_high >= 0"),
        (GMPO, {"clip_low": -0.1}, "expected clip_low >= 0, got -0.1"),
        (GMPO, {"clip_high": NAN}, "expected clip_high >= 0, got nan"),
    ],
)
def test_bounds_out_of_range_are_refused(loss: type, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss(**options)
    assert GMPO(clip_low=0.0).clip_low == 0.0
