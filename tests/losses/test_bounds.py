"""Bounds of the log-ratio before exp: ours by default, another one, or none."""

import math

import pytest
import torch
from kit.losses import loss_of, with_bound
from torch import Tensor

from lightning_rl import DPPO, GMPO, GSPO, ClippedSurrogate
from lightning_rl.signal.importance_ratios import LOG_RATIO_BOUND, policy_ratio
from lightning_rl.signal.kl import TANGENT_SLOPE, importance, k3

LOGPROBS = torch.tensor([[-1.0, -0.5]], dtype=torch.float64)
FAR = LOGPROBS - torch.tensor([[25.0, 0.5]], dtype=torch.float64)
BAD = -torch.ones_like(LOGPROBS)


@pytest.mark.parametrize(("bound", "ratio"), [({}, 20.0), ({"bound": 3.0}, 3.0), ({"bound": math.inf}, 25.0)])
def test_a_ratio_stops_at_its_bound(bound: dict[str, float], ratio: float) -> None:
    assert policy_ratio(LOGPROBS, FAR, **bound)[0].tolist() == pytest.approx([math.exp(ratio), math.exp(0.5)])
    assert importance(LOGPROBS, FAR, **bound)[0, 0].item() == pytest.approx(math.exp(ratio))


def slopes(loss: Tensor, logprobs: Tensor) -> list[float]:
    return torch.autograd.grad(loss.sum(), logprobs)[0][0].tolist()


@pytest.mark.parametrize(("bound", "slope"), [(LOG_RATIO_BOUND, 0.0), (math.inf, math.exp(25))])
def test_a_token_beyond_the_bound_has_no_gradient_and_one_without_a_bound_has(bound: float, slope: float) -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    for loss in (ClippedSurrogate(), DPPO()):
        value = loss_of(with_bound(loss, bound), logprobs, FAR, BAD)
        assert slopes(value, logprobs)[0] == pytest.approx(slope)


def test_gspo_bounds_the_mean_of_a_row() -> None:
    valid = torch.ones_like(LOGPROBS, dtype=torch.bool)
    losses = [with_bound(GSPO(), bound) for bound in (math.inf, 10.0)]
    free, bounded = (loss_of(loss, LOGPROBS, FAR, BAD, valid)[0, 0] for loss in losses)
    assert [free.item(), bounded.item()] == pytest.approx([math.exp(25.5 / 2), math.exp(10)])


def test_gmpo_bounds_the_mean_of_a_row_and_no_token() -> None:
    logprobs, valid = FAR.clone().requires_grad_(), torch.ones_like(LOGPROBS, dtype=torch.bool)
    loss = loss_of(GMPO(), logprobs, LOGPROBS, -BAD, valid)
    assert loss[0, 0].item() == pytest.approx(-math.exp(-25.5 / 2))
    assert all(slope < 0 for slope in slopes(loss, logprobs))


def test_k3_without_its_tangent_is_the_exponential() -> None:
    gap = torch.tensor([-25.0, 3.0], dtype=torch.float64)
    plain, bent = (k3(gap, torch.zeros_like(gap), tangent=tangent) for tangent in (False, True))
    assert plain.tolist() == pytest.approx([math.exp(25) - 26, math.exp(-3) + 2])
    assert bent.tolist() == pytest.approx([6 * TANGENT_SLOPE - 26, math.exp(-3) + 2])
