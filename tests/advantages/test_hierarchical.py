"""HierarchicalGRPO: attempts compare within their sample, and the rest of a sample within its group."""

import statistics
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightning_rl.advantages import GRPO, RLOO, DrGRPO, HierarchicalGRPO, MaxRL, RewardSignal
from lightning_rl.rollout import ROLES, Ragged, Rollout, attempts_of, role_number

# Three samples of a prompt and one of another. A proposal of two tokens, and attempts of two tokens each, of which the
# second of row 0 has a later turn; their rewards at the last token.
PROPOSED, SOLVED = [0.5, 1.0, 0.0, 2.0], [[1.0, 0.0, 0.5], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [2.0, 0.0, 1.0]]
ATTEMPTS = torch.tensor([1, 1, 2, 2, 3, 3, 4, 4, 3, 3])
LATER = 0.25


def signal_of(rewarded: tuple[bool, ...] = (True,) * 4) -> RewardSignal:
    roles = torch.where(ATTEMPTS == 1, role_number("proposer"), role_number("solver")).expand(4, 10).clone()
    earned = torch.zeros(4, 10, dtype=torch.float64)
    earned[:, 1] = torch.tensor(PROPOSED)
    earned[:, 3:8:2] = torch.tensor(SOLVED, dtype=torch.float64)
    earned[0, 9] = LATER
    valid = torch.ones(4, 10, dtype=torch.bool)
    valid[1:, 8:] = False
    kept = torch.tensor(rewarded)
    return RewardSignal(
        scores=torch.where(kept, earned.sum(-1), torch.nan),
        rewarded=kept,
        groups=torch.tensor([7, 7, 7, 9]),
        valid_tokens=valid,
        token_rewards=torch.zeros_like(earned),
        shaped=earned,
        turn_rewards=torch.where(kept[:, None], earned, 0.0),
        roles=torch.where(valid, roles, 0),
        attempts=torch.where(valid, ATTEMPTS, 0),
    )


def standardize(value: float, values: list[float]) -> float:
    return 0.0 if len(set(values)) < 2 else (value - statistics.fmean(values)) / (statistics.stdev(values) + 1e-6)


def by_hand(rewarded: tuple[bool, ...] = (True,) * 4) -> Tensor:
    found = torch.zeros(4, 10, dtype=torch.float64)
    for row in (row for row in range(4) if rewarded[row]):
        proposals = [PROPOSED[other] for other in range(3) if rewarded[other]] if row < 3 else [PROPOSED[3]]
        found[row, :2] = standardize(PROPOSED[row], proposals)
        returns = [SOLVED[row][0], SOLVED[row][1] + LATER * (row == 0), SOLVED[row][2]]
        for attempt, value in enumerate(returns):
            found[row, : 8 if row else 10][ATTEMPTS[: 8 if row else 10] == attempt + 2] = standardize(value, returns)
    return found


@pytest.mark.parametrize("rewarded", [(True,) * 4, (True, False, True, True), (False, False, True, False)])
def test_attempts_compare_in_their_sample_and_proposals_in_their_group(rewarded: tuple[bool, ...]) -> None:
    expected = by_hand(rewarded)
    assert_close(HierarchicalGRPO()(signal_of(rewarded)).advantages, expected, rtol=0, atol=1e-12)
    assert expected.any() and not expected[1, 2:].any()  # equal attempts


def test_the_mean_alone_is_subtracted_with_dr_grpo_as_prime_rl_does() -> None:
    found = HierarchicalGRPO(comparison=DrGRPO())(signal_of()).advantages
    mean = (1.0 + LATER + 0.5) / 3
    attempts = [1.0 - mean] * 2 + [LATER - mean] * 2 + [0.5 - mean] * 2 + [LATER - mean] * 2
    assert found[0].tolist() == pytest.approx([0.0, 0.0, *attempts])
    assert found[:3, 0].tolist() == pytest.approx([0.0, 0.5, -0.5]) and found[3, :2].tolist() == [0.0, 0.0]


def test_all_but_the_attempts_is_the_same_without_them_and_bonuses_of_a_row_belong_to_it() -> None:
    plain, more = signal_of(), signal_of()
    more = replace(more, scores=more.scores + torch.tensor([1.0, 0.0, 0.0, 0.0]))
    ours, theirs = (HierarchicalGRPO()(one).advantages for one in (plain, more))
    assert torch.equal(ours[:, 2:], theirs[:, 2:]) and theirs[0, 0] > ours[0, 0]
    other = HierarchicalGRPO(role="judge")(plain).advantages
    assert torch.equal(other, GRPO()(plain).advantages)


def test_rounding_of_the_sum_of_rewards_is_no_difference_of_proposals() -> None:
    given = replace(signal_of(), scores=torch.tensor([0.3, 0.3, 0.3, 0.0], dtype=torch.float64))
    parts = torch.zeros(4, 10, dtype=torch.float64)
    parts[:3, 3], parts[0, 3], parts[0, 5] = 0.3, 0.1, 0.2
    strict = HierarchicalGRPO(comparison=GRPO(epsilon=0.0))
    assert not strict(replace(given, turn_rewards=parts)).advantages[:, :2].any()


def test_samples_alone_have_an_advantage_by_their_attempts() -> None:
    assert not HierarchicalGRPO().compares and HierarchicalGRPO().within_groups and HierarchicalGRPO().shift_invariant
    alone = replace(signal_of(), groups=torch.arange(4))
    found = HierarchicalGRPO()(alone).advantages
    assert found[0, 2:].all() and not found[:, :2].any()


def test_an_attempt_is_a_turn_of_a_role_with_the_turns_of_it_that_continue_it() -> None:
    """A proposal in the prompt's context; in another one three attempts, of which one goes on after a judge's turn."""
    segments = [(0, -1, 1), (1, -2, -1), (2, 1, 2), (3, 1, 3), (4, 3, 0), (5, 4, 4), (6, 5, 5), (7, 5, 6), (8, 1, 7)]
    roles = ["proposer", "", "solver", "solver", "", "judge", "solver", "solver", "solver"]
    rollout = Rollout.of_samples([[2]] * 2, [[3] * 9, [3]], groups=[0, 0])
    numbers = torch.tensor([[role_number(role) for role in roles], [role_number("solver"), *[0] * 8]])
    rows = Ragged(torch.tensor([*segments, (0, -1, 1)]), torch.tensor([9, 1]))
    rollout = rollout.replace(segments=rows, token_extras={ROLES: numbers})
    assert attempts_of(rollout).tolist() == [[1, 0, 2, 3, 0, 4, 3, 3, 7], [1, *[0] * 8]]


@pytest.mark.parametrize("options", [{"role": ""}, {"comparison": MaxRL()}, {"comparison": "grpo"}])
def test_a_wrong_option_is_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=f"expected .*{'role' if 'role' in options else 'comparison'}"):
        HierarchicalGRPO(**options)
    assert HierarchicalGRPO(comparison=RLOO()).comparison == RLOO()
