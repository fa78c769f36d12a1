"""Losses of single tokens: hand-worked values and gradients, bounds, overflow."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.losses import loss_of
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import ClippedSurrogate, PolicyLoss, Reinforce, ValueLoss

NAN, INF = math.nan, math.inf


def clipped_surrogate(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, **knobs: float) -> Tensor:
    return loss_of(ClippedSurrogate(**knobs), logprobs, old_logprobs, advantages)


def policy_gradient(logprobs: Tensor, advantages: Tensor) -> Tensor:
    return loss_of(Reinforce(), logprobs, logprobs.detach(), advantages)


def with_slope(loss: Callable[[Tensor], Tensor], point: float | Tensor) -> tuple[Tensor, Tensor]:
    variable = torch.as_tensor(point, dtype=torch.float64).reshape(1, -1).detach().requires_grad_()
    value = loss(variable)
    return value.detach(), torch.autograd.grad(value.sum(), variable)[0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "knobs", "value", "slope"),
    [
        pytest.param(1.0, 2.0, {}, -2.0, -2.0, id="on-policy"),
        pytest.param(1.1, 1.0, {}, -1.1, -1.1, id="inside-good"),
        pytest.param(1.1, -1.0, {}, 1.1, 1.1, id="inside-bad"),
        pytest.param(1.8, 1.0, {}, -1.2, 0.0, id="above-good-is-clipped"),
        pytest.param(1.8, -1.0, {}, 1.8, 1.8, id="above-bad-is-not"),
        pytest.param(0.5, 1.0, {}, -0.5, -0.5, id="below-good-is-not"),
        pytest.param(0.5, -1.0, {}, 0.8, 0.0, id="below-bad-is-clipped"),
        pytest.param(3.0, 0.0, {}, 0.0, 0.0, id="neutral"),
        pytest.param(1.25, 1.0, {"clip_high": 0.28}, -1.25, -1.25, id="clip-higher-has-room"),
        pytest.param(1.25, 1.0, {"clip_low": 0.28}, -1.2, 0.0, id="clip-lower-gives-none-above"),
        pytest.param(0.75, -1.0, {"clip_low": 0.28}, 0.75, 0.75, id="clip-lower-has-room-below"),
        pytest.param(1.0, 1.0, {"clip_low": 0.0, "clip_high": 0.0}, -1.0, -1.0, id="no-room-still-learns-on-policy"),
        pytest.param(0.001, 1.0, {"clip_low": 1.0}, -0.001, -0.001, id="widest-low"),
        pytest.param(2.0, 2.0, {"dual_clip": 1.5}, -2.4, 0.0, id="dual-clip-spares-the-good"),
        pytest.param(2.0, -2.0, {"dual_clip": 1.5}, 3.0, 0.0, id="dual-clip-bounds-the-bad"),
        pytest.param(1.4, -2.0, {"dual_clip": 1.5}, 2.8, 2.8, id="dual-clip-inside"),
        pytest.param(0.5, 2.0, {"dual_clip": 1.5}, -1.0, -1.0, id="dual-clip-below"),
        pytest.param(2.0, -2.0, {}, 4.0, 4.0, id="no-dual-clip"),
    ],
)
def test_clipped_surrogate(ratio: float, advantage: float, knobs: dict[str, float], value: float, slope: float) -> None:
    tensor = torch.tensor([[advantage]], dtype=torch.float64)
    old = torch.full_like(tensor, -0.7)
    found = with_slope(lambda new: clipped_surrogate(new, old, tensor, **knobs), math.log(ratio) - 0.7)
    assert_close(torch.cat(found), torch.tensor([[value], [slope]], dtype=torch.float64))


@given(ratio=st.floats(0.1, 4), advantage=st.floats(-3, 3), scale=st.floats(0.1, 10))
def test_the_surrogate_scales_with_the_advantage_and_never_promises_more_than_the_plain_ratio(
    ratio: float, advantage: float, scale: float
) -> None:
    new, old = torch.tensor([[math.log(ratio)]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    one = torch.tensor([[advantage]], dtype=torch.float64)
    loss = clipped_surrogate(new, old, one)
    assert_close(clipped_surrogate(new, old, scale * one), scale * loss)
    assert loss >= -new.exp() * one - 1e-12  # pessimistic: a lower bound of the objective
    assert clipped_surrogate(new, old, one, dual_clip=1.5) <= loss


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_one_broken_token_spoils_no_other(poison: float) -> None:
    new, old, advantages = torch.tensor([[-1.0, poison]]), torch.tensor([[-1.5, -1.0]]), torch.tensor([[1.0, poison]])
    assert clipped_surrogate(new, old, advantages)[0, 0] == clipped_surrogate(new[:, :1], old[:, :1], torch.ones(1, 1))
    assert ValueLoss()(new, old, advantages)[0, 0] == ValueLoss()(new[:, :1], old[:, :1], torch.ones(1, 1))
    assert policy_gradient(new, advantages)[0, 0] == 1.0


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "slope"),
    [
        pytest.param(0.5, 0.0, 1.0, None, 0.125, -0.5, id="plain"),
        pytest.param(0.125, 0.0, 1.0, 0.25, 0.3828125, -0.875, id="inside"),
        pytest.param(0.5, 0.0, 1.0, 0.25, 0.28125, 0.0, id="moved-far-towards-the-target"),
        pytest.param(-0.5, 0.0, 1.0, 0.25, 1.125, -1.5, id="moved-far-away"),
        pytest.param(2.0, 0.0, -1.0, 0.25, 4.5, 3.0, id="moved-far-up-target-below"),
        pytest.param(-0.5, 0.0, -1.0, 0.25, 0.28125, 0.0, id="clipped-from-below"),
        pytest.param(0.25, 0.0, 1.0, 0.25, 0.28125, -0.75, id="exactly-the-bound-still-learns"),
        pytest.param(1.0, 1.0, 1.0, 0.25, 0.0, 0.0, id="right"),
    ],
)
def test_value_loss(value: float, old: float, target: float, clip: float | None, loss: float, slope: float) -> None:
    tensors = torch.tensor([[old]], dtype=torch.float64), torch.tensor([[target]], dtype=torch.float64)
    found = with_slope(lambda x: ValueLoss(clip=clip)(x, *tensors), value)
    assert torch.cat(found).flatten().tolist() == [loss, slope]


@pytest.mark.parametrize("loss", [ClippedSurrogate(), Reinforce()])
def test_shapes_that_would_broadcast_are_refused_by_name(loss: PolicyLoss) -> None:
    row = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"expected advantages of shape \[2, 3\], got \[2, 1\]"):
        loss_of(loss, row, row, row[:, :1])


def test_a_value_loss_refuses_shapes_that_would_broadcast() -> None:
    row = torch.zeros(2, 3)
    message = r"one shape, got values \[2, 3\], old_values \[2, 3\], returns \[2, 1\]"
    with pytest.raises(ValueError, match=message):
        ValueLoss()(row, row, row[:, :1])
