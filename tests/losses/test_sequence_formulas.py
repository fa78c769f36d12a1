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


@pytest.mark.parametrize("loss", [GSPO(), GMPO()])
def test_shapes_that_would_broadcast_are_refused_by_name(loss: PolicyLoss) -> None:
    with pytest.raises(ValueError, match=r"expected advantages of shape \[2, 3\], got \[2, 1\]"):
        loss_of(loss, OLD, OLD, GOOD[:, :1], VALID)
