"""I-30: the recursions along a row against forms that are written out, quadratic in its length, and in chunks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import LossView
from lightning_rl.signal.discounted_returns import discounted_returns, gae
from properties.batches import KINDS, many, some, views

decays = st.sampled_from([0.0, 0.5, 0.9, 1.0])
exactly = {torch.float32: 1e-5, torch.float64: 1e-10}
each_dtype = pytest.mark.parametrize("dtype", exactly)


def slow_gae(rewards: Tensor, values: Tensor, valid: Tensor, gamma: float, lam: float, bootstrap: Tensor) -> Tensor:
    """The sum over all later temporal differences, from a list of each row's valid tokens."""
    found = torch.zeros_like(rewards)
    for row, mask in enumerate(valid):
        steps = mask.nonzero()[:, 0].tolist()
        value = [*(float(values[row, step]) for step in steps), float(bootstrap[row])]
        gaps = [float(rewards[row, step]) + gamma * value[n + 1] - value[n] for n, step in enumerate(steps)]
        for place, step in enumerate(steps):
            found[row, step] = sum((gamma * lam) ** (later - place) * gaps[later] for later in range(place, len(steps)))
    return found


def slow_returns(rewards: Tensor, valid: Tensor, gamma: float) -> Tensor:
    """A matrix of powers of the discount, by how many valid tokens lie between two."""
    number = valid.cumsum(-1).double()
    between = number[:, None, :] - number[:, :, None]
    power = torch.where(between >= 0, torch.full_like(between, gamma) ** between.clamp(min=0), 0.0)
    kept = power * valid[:, None, :] * valid[:, :, None] * torch.ones_like(between).triu()
    return (kept * torch.where(valid, rewards, 0.0).double()[:, None, :]).sum(-1).to(rewards.dtype)


@each_dtype
@given(view=views(), gamma=decays, lam=decays)
@many
def test_i_30_advantages_equal_the_quadratic_form(dtype: torch.dtype, view: LossView, gamma: float, lam: float) -> None:
    rewards, values = view.require("returns").to(dtype), view.require("values").to(dtype)
    end = view.rewards.to(dtype)
    found = gae(rewards, values, view.valid_tokens, gamma=gamma, lam=lam, bootstrap=end)
    expected = slow_gae(rewards, values, view.valid_tokens, gamma, lam, end)
    assert_close(found, expected, atol=exactly[dtype], rtol=exactly[dtype])
    without = gae(rewards, values, view.valid_tokens, gamma=gamma, lam=lam)
    nothing = slow_gae(rewards, values, view.valid_tokens, gamma, lam, torch.zeros_like(end))
    assert_close(without, nothing, atol=exactly[dtype], rtol=exactly[dtype])


@each_dtype
@given(view=views(), gamma=decays)
@many
def test_i_30_returns_equal_the_quadratic_form(dtype: torch.dtype, view: LossView, gamma: float) -> None:
    rewards = view.require("returns").to(dtype)
    found = discounted_returns(rewards, view.valid_tokens, gamma=gamma)
    assert_close(found, slow_returns(rewards, view.valid_tokens, gamma), atol=exactly[dtype], rtol=exactly[dtype])


@given(view=views(kinds=[kind for kind in KINDS if kind != "empty"]), gamma=decays, size=st.integers(1, 7))
@some
def test_i_30_chunks_joined_through_the_bootstrap_equal_the_whole(view: LossView, gamma: float, size: int) -> None:
    rewards, valid = view.require("returns"), view.valid_tokens
    nothing = torch.zeros_like(rewards)
    following, chunks = torch.zeros(len(view), dtype=torch.float64), []
    for start in reversed(range(0, view.width, size)):
        part = slice(start, start + size)
        own = valid[:, part]
        chunk = gae(rewards[:, part], nothing[:, part], own, gamma=gamma, bootstrap=following)
        chunks.insert(0, chunk)
        first = own & (own.cumsum(-1) == 1)
        following = torch.where(own.any(-1), torch.where(first, chunk, 0.0).sum(-1), following)
    assert_close(torch.cat(chunks, 1), discounted_returns(rewards, valid, gamma=gamma), atol=1e-12, rtol=0)
