"""Generalised advantage estimation: against an independent slow form, with holes, and as the object PPO uses."""

import math
from typing import Any

import pytest
import torch
from kit.support import in_lockstep
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_rl import GAE, Estimator
from lightning_rl.advantages import Advantages, RewardSignal
from lightning_rl.signal.discounted_returns import gae
from lightning_rl.signal.masked import GlobalSum, local_sum, whiten

NAN, INF = math.nan, math.inf


def slow_gae(rewards: Tensor, values: Tensor, valid: Tensor, gamma: float, lam: float) -> Tensor:
    """The sum over later temporal differences, written out over a list of the valid tokens."""
    found = torch.zeros_like(values)
    for row in range(len(values)):
        steps = valid[row].nonzero().flatten().tolist()
        reward, value = [float(rewards[row, step]) for step in steps], [float(values[row, step]) for step in steps]
        value.append(0.0)
        for place, step in enumerate(steps):
            found[row, step] = sum(
                (gamma * lam) ** (later - place) * (reward[later] + gamma * value[later + 1] - value[later])
                for later in range(place, len(steps))
            )
    return found


@pytest.mark.parametrize(
    ("rewards", "values", "valid", "gamma", "lam", "expected"),
    [
        pytest.param([-0.005, -0.01, 0.985], [0, 0, 0], [1, 1, 1], 1, 1, [0.97, 0.975, 0.985], id="raw-kl-witness"),
        pytest.param([0, 0, 1], [0, 0, 0], [1, 1, 1], 0.5, 1, [0.25, 0.5, 1], id="discounted"),
        pytest.param([0, 0, 1], [0.5, 0.5, 0.5], [1, 1, 1], 1, 0, [0, 0, 0.5], id="one-step"),
        pytest.param([0, 0, 1], [0.5, 0.5, 0.5], [1, 1, 1], 1, 0.5, [0.125, 0.25, 0.5], id="lambda"),
        pytest.param([0, 9, 1], [0.5, 9, 0.5], [1, 0, 1], 0.5, 0.5, [-0.125, 0, 0.5], id="hole-is-no-time-step"),
        pytest.param([0, NAN, 1, INF], [0, NAN, 0, NAN], [1, 0, 1, 0], 0.5, 1, [0.5, 0, 1, 0], id="poison-in-holes"),
        pytest.param([1, 2], [3, 4], [0, 0], 1, 1, [0, 0], id="no-valid-token"),
        pytest.param([2], [0.5], [1], 0.9, 0.9, [1.5], id="one-token"),
        pytest.param([], [], [], 1, 1, [], id="no-tokens"),
    ],
)
def test_hand_worked_rows(
    rewards: list[float], values: list[float], valid: list[int], gamma: float, lam: float, expected: list[float]
) -> None:
    found = gae(
        torch.tensor([rewards], dtype=torch.float32),
        torch.tensor([values], dtype=torch.float32),
        torch.tensor([valid], dtype=torch.bool),
        gamma=gamma,
        lam=lam,
    )
    assert_close(found, torch.tensor([expected], dtype=torch.float32), atol=1e-6, rtol=0)


def over_every_position(rewards: Tensor, values: Tensor, valid: Tensor, bootstrap: Tensor, lam: Tensor) -> Tensor:
    """The recursion over all positions, in which a masked one changes nothing."""
    rewards, values = torch.where(valid, rewards, 0.0), torch.where(valid, values, 0.0)
    running, following, columns = torch.zeros(len(values)), bootstrap, []
    for step in reversed(range(values.shape[1])):
        there = valid[:, step]
        delta = rewards[:, step] + 0.97 * following - values[:, step]
        running = torch.where(there, delta + 0.97 * lam * running, running)
        following = torch.where(there, values[:, step], following)
        columns.insert(0, torch.where(there, running, 0.0))
    return torch.stack(columns, 1)


@pytest.mark.parametrize(("width", "share"), [(40, 0.7), (40, 0.2), (3000, 0.002)], ids=["holes", "few", "padding"])
def test_masked_positions_change_no_bit(width: int, share: float) -> None:
    draw = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 9, width, generator=draw).unbind()
    valid = torch.rand(9, width, generator=draw) < share
    valid[0] = False
    bootstrap, lam = torch.rand(2, 9, generator=draw).unbind()
    found = gae(rewards, values, valid, gamma=0.97, lam=lam, bootstrap=bootstrap)
    assert torch.equal(found, over_every_position(rewards, values, valid, bootstrap, lam))


class Operations(TorchDispatchMode):
    """Counts the calls of PyTorch's kernels."""

    number = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def operations(valid: Tensor) -> int:
    with Operations() as mode:
        gae(valid.float(), valid.float(), valid)
    return mode.number


def test_the_loop_has_as_many_steps_as_the_longest_row_has_valid_tokens() -> None:
    holes = torch.zeros(2, 500, dtype=torch.bool)
    holes[0, [3, 200, 499]], holes[1, [0, 1, 2, 9]] = True, True
    dense = operations(torch.ones(2, 4, dtype=torch.bool))
    assert operations(holes) == dense < operations(torch.ones(1, 5, dtype=torch.bool))


@pytest.mark.parametrize("value", [-0.1, 1.1, NAN])
@pytest.mark.parametrize("knob", ["gamma", "lam"])
def test_discounts_outside_0_to_1_are_refused(knob: str, value: float) -> None:
    knobs: dict[str, Any] = {knob: value}
    row = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=rf"expected {knob} in \[0, 1\]"):
        gae(row, row, row.bool(), **knobs)
    with pytest.raises(ValueError, match=rf"expected {knob} in \[0, 1\]"):
        GAE(**knobs)


def estimated(
    estimator: Estimator, shaped: Tensor, values: Tensor | None, valid: Tensor, total: GlobalSum = local_sum
) -> Advantages:
    rows = len(shaped)
    signal = RewardSignal(
        scores=torch.zeros(rows),
        rewarded=torch.ones(rows, dtype=torch.bool),
        groups=torch.arange(rows),
        valid_tokens=valid,
        token_rewards=torch.zeros_like(shaped),
        shaped=shaped,
        values=values,
        global_sum=total,
    )
    return estimator(signal)


def test_the_object_returns_advantages_and_returns_that_are_0_at_masked_tokens() -> None:
    rewards, values = torch.tensor([[0.0, 1.0, NAN]]), torch.tensor([[0.25, 0.5, NAN]])
    advantages, returns = estimated(GAE(whitened=False, lam=0.5), rewards, values, torch.tensor([[True, True, False]]))
    assert_close(advantages, torch.tensor([[0.5, 0.5, 0.0]]))
    assert_close(returns, torch.tensor([[0.75, 1.0, 0.0]]))


def test_whitening_touches_the_advantages_and_not_the_returns() -> None:
    draw = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 4, 5, generator=draw).unbind()
    valid = torch.rand(4, 5, generator=draw) > 0.3
    raw, plain_returns = estimated(GAE(whitened=False), rewards, values, valid)
    advantages, returns = estimated(GAE(), rewards, values, valid)
    assert_close(advantages, whiten(raw, valid))
    assert returns is not None and plain_returns is not None and torch.equal(returns, plain_returns)
    parts = [slice(0, 1), slice(1, 4)]
    ranks = in_lockstep(
        *[lambda total, own=own: estimated(GAE(), rewards[own], values[own], valid[own], total)[0] for own in parts]
    )
    assert_close(torch.cat(ranks), advantages)


def test_the_object_needs_values() -> None:
    with pytest.raises(ValueError, match=r"expected values for GAE, got none: pass critic="):
        estimated(GAE(), torch.zeros(1, 1), None, torch.ones(1, 1, dtype=torch.bool))
