"""Decays that follow the length of a row, and GAE with them."""

import pytest
import torch
from torch.testing import assert_close

from lightning_rl import GAE
from lightning_rl.advantages import LengthAdaptive, RelativePosition, RewardSignal, TraceDecay
from lightning_rl.signal.shaped_rewards import shaped_rewards


@pytest.mark.parametrize(
    ("decay", "steps", "expected"),
    [
        pytest.param(LengthAdaptive(0.05), [0, 1, 20, 40, 400], [0, 0, 0, 0.5, 0.95], id="vapo"),
        pytest.param(LengthAdaptive(1.0), [1, 2, 4], [0, 0.5, 0.75], id="vapo-alpha-1"),
        pytest.param(RelativePosition(0.25), [0, 1, 2, 3], [1, 1, 0.25, 0.5], id="relative"),
        pytest.param(RelativePosition(1.0), [1, 5, 900], [1, 1, 1], id="relative-keeps-all"),
    ],
)
def test_hand_worked_decays(decay: TraceDecay, steps: list[int], expected: list[float]) -> None:
    assert_close(decay(torch.tensor(steps)), torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("length", [2, 7, 301])
def test_the_first_step_keeps_its_share_of_the_last_reward_whatever_the_length(length: int) -> None:
    kept = RelativePosition(0.3)(torch.tensor([length], dtype=torch.int64)).double() ** (length - 1)
    assert float(kept) == pytest.approx(0.3, rel=1e-4)


def signal(valid: list[list[int]]) -> RewardSignal:
    mask = torch.tensor(valid).bool()
    scores = torch.ones(len(mask), dtype=torch.float64)
    nothing = torch.zeros(mask.shape, dtype=torch.float64)
    return RewardSignal(
        scores=scores,
        rewarded=mask[:, 0] | True,
        groups=torch.arange(len(mask)),
        valid_tokens=mask,
        token_rewards=nothing,
        shaped=shaped_rewards(scores, nothing, mask),
        values=nothing,
    )


def test_every_row_has_the_decay_of_its_own_valid_tokens() -> None:
    rows = signal([[1, 0, 1, 1, 0], [1, 1, 0, 0, 0]])
    found = GAE(lam=RelativePosition(0.25), whitened=False)(rows).advantages
    assert_close(found, torch.tensor([[0.25, 0, 0.5, 1, 0], [0.25, 1, 0, 0, 0]], dtype=torch.float64))


def test_the_critic_learns_with_a_decay_of_its_own() -> None:
    rows = signal([[1, 1, 1]])
    advantages, returns = GAE(lam=0.5, lam_critic=1.0, whitened=False)(rows)
    assert_close(advantages, torch.tensor([[0.25, 0.5, 1.0]], dtype=torch.float64))
    assert returns is not None
    assert_close(returns, torch.ones(1, 3, dtype=torch.float64))
    assert_close(GAE(lam=0.5)(rows).returns, torch.tensor([[0.25, 0.5, 1.0]], dtype=torch.float64))
