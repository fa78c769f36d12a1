"""GAE over turns: one time step a turn, its value before its first drawn token."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lightning_rl.advantages import GAEOverTurns, LengthAdaptive, RelativePosition, RewardSignal
from lightning_rl.signal.discounted_returns import gae, turn_gae
from lightning_rl.signal.shaped_rewards import shaped_rewards

NAN = math.nan


@pytest.mark.parametrize(
    ("rewards", "values", "valid", "turns", "gamma", "lam", "advantages", "returns"),
    [
        pytest.param([0, 1], [0.5, 9], [1, 1], [1, 1], 1, 1, [0.5, 0.5], [1, 1], id="one-turn"),
        pytest.param(
            [0, 0, 9, 1], [0.5, 9, 9, 0.25], [1, 1, 0, 1], [1, 1, 0, 2], 1, 0, [-0.25, -0.25, 0, 0.75],
            [0.25, 0.25, 0, 1], id="one-step",
        ),
        pytest.param(
            [0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 0, 1], [1, 1, 0, 2], 0.5, 1, [0.5, 0.5, 0, 1], [0.5, 0.5, 0, 1],
            id="a-turn-is-discounted-once",
        ),
        pytest.param(
            [0.25, 0.5, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 2, 2], 1, 0, [0.75, 0.75, 1, 1], [0.75, 0.75, 1, 1],
            id="rewards-of-a-turn-add-up-and-turns-may-touch",
        ),
        pytest.param(
            [NAN, 1, NAN, 2], [NAN, 0.5, NAN, 0], [0, 1, 0, 1], [1, 1, 0, 3], 1, 1, [0, 2.5, 0, 2], [0, 3, 0, 2],
            id="poison-and-numbers-left-out",
        ),
        pytest.param(
            [1, 1, 1], [0.5, 0.25, 0], [1, 1, 1], [1, 2, 3], 0.5, 0.5, [0.875, 1.0, 1.0], [1.375, 1.25, 1.0],
            id="lambda-of-turns-of-one-token",
        ),
        pytest.param([1, 1], [1, 1], [0, 0], [1, 2], 1, 1, [0, 0], [0, 0], id="no-valid-token"),
    ],
)  # fmt: skip
def test_hand_worked_rows(
    rewards: list[float],
    values: list[float],
    valid: list[int],
    turns: list[int],
    gamma: float,
    lam: float,
    advantages: list[float],
    returns: list[float],
) -> None:
    found = turn_gae(
        torch.tensor([rewards], dtype=torch.float64),
        torch.tensor([values], dtype=torch.float64),
        torch.tensor([valid]).bool(),
        torch.tensor([turns]),
        gamma=gamma,
        lam=lam,
    )
    assert_close(found.advantages, torch.tensor([advantages], dtype=torch.float64))
    assert_close(found.returns, torch.tensor([returns], dtype=torch.float64))


@given(st.integers(0, 999), st.floats(0, 1), st.floats(0, 1))
def test_turns_of_one_token_are_tokens(seed: int, gamma: float, lam: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, 6, generator=draw, dtype=torch.float64).unbind()
    valid = torch.rand(3, 6, generator=draw) > 0.3
    turns = torch.arange(1, 7).expand(3, 6)
    found = turn_gae(rewards, values, valid, turns, gamma=gamma, lam=lam).advantages
    assert_close(found, gae(rewards, values, valid, gamma=gamma, lam=lam))


def signal(turns: torch.Tensor | None) -> RewardSignal:
    valid = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]]).bool()
    scores, nothing = torch.tensor([1.0, 0.0]).double(), torch.zeros(2, 5, dtype=torch.float64)
    return RewardSignal(
        scores=scores,
        rewarded=torch.tensor([True, True]),
        groups=torch.tensor([0, 1]),
        valid_tokens=valid,
        token_rewards=nothing,
        shaped=shaped_rewards(scores, None, valid),
        values=nothing + 0.25,
        turns=turns,
    )


TURNS = torch.tensor([[1, 1, 0, 2, 2], [1, 1, 1, 0, 0]])


def test_the_estimator_counts_turns_for_discount_and_decay() -> None:
    estimator = GAEOverTurns(gamma=1.0, lam=RelativePosition(0.5), whitened=False)
    advantages, returns = estimator(signal(TURNS))
    wanted = [[0.375, 0.375, 0, 0.75, 0.75], [-0.25, -0.25, -0.25, 0, 0]]
    assert_close(advantages, torch.tensor(wanted, dtype=torch.float64))
    assert returns is not None and returns[0].tolist() == [0.625, 0.625, 0, 1, 1]
    adaptive = GAEOverTurns(lam=LengthAdaptive(1.0), whitened=False)(signal(TURNS)).advantages
    assert float(adaptive[0, 0]) == pytest.approx(0.375), "1 - 1/2 for two turns"


def test_the_critic_learns_with_a_decay_of_its_own() -> None:
    advantages, returns = GAEOverTurns(lam=0.0, lam_critic=1.0, whitened=False)(signal(TURNS))
    assert advantages[0].tolist() == [0.0, 0.0, 0.0, 0.75, 0.75], "of one step: 0.25 - 0.25, 1 - 0.25"
    assert returns is not None and returns[0].tolist() == [1.0, 1.0, 0.0, 1.0, 1.0], "what followed"
    _, same = GAEOverTurns(lam=0.0, whitened=False)(signal(TURNS))
    assert same is not None and same[0].tolist() == [0.25, 0.25, 0.0, 1.0, 1.0]
    _, adaptive = GAEOverTurns(lam=0.0, lam_critic=RelativePosition(0.5), whitened=False)(signal(TURNS))
    assert adaptive is not None and adaptive[0].tolist() == [0.625, 0.625, 0.0, 1.0, 1.0], "half of the last step"


def test_without_turns_a_response_is_one() -> None:
    advantages, returns = GAEOverTurns(whitened=False)(signal(None))
    assert advantages.tolist() == [[0.75, 0.75, 0, 0.75, 0.75], [-0.25, -0.25, -0.25, 0, 0]]
    assert returns is not None and returns[0].tolist() == [1, 1, 0, 1, 1]


def test_whitening_weighs_tokens() -> None:
    found = GAEOverTurns()(signal(TURNS)).advantages
    valid = signal(TURNS).valid_tokens
    assert float(found[valid].mean()) == pytest.approx(0, abs=1e-12)
    assert float(found[valid].std()) == pytest.approx(1)
