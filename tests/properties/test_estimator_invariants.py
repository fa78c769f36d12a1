"""Every exported estimator: what its advantages must not depend on, and what they must follow."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.support import callback_of
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import GAE, LossView, ReMax, RLCallback
from lightning_rl.corrections import Corrections
from lightning_rl.rollout import turn_numbers
from lightning_rl.rollouts.estimate_signal import estimate_signal, exclude_rows
from lightning_rl.signal.statistics import group_statistics
from properties.batches import (
    WITNESS,
    disturbed,
    few,
    inserted,
    joined,
    rows,
    some,
    twice,
    view_of_rows,
    views,
    without_columns,
)
from properties.evaluation import agree, signal_of, tensor_versions
from properties.exports import ESTIMATOR_EXAMPLES, corrections_with, name_of, quick

each = pytest.mark.parametrize("name", quick(ESTIMATOR_EXAMPLES))
every = pytest.mark.parametrize("name", ESTIMATOR_EXAMPLES)
BATCH_WIDE = {
    "lite-ppo",
    "batch",
    "batch-rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rpp-discounted",
    "gae",
    "gae-relative",
    "gae_over_turns",
    "gpg",
    "gpg-nonzero",
}
"""Have a statistic of the whole batch; that the others have none is tested, and that these have one."""
WHITENED = {"batch", "batch-rloo", "reinforce_plus_plus"}  # do not compare groups, but the batch
FOLLOW_A_SHIFT = {"reinforce", "remax", "raw", "scaled", "maxrl", "gae", "gae-raw", "rpp-discounted", "gae-vapo"}
FOLLOW_A_SHIFT |= {"gae-relative", "gae_over_turns", "gae_over_turns-raw", "gae_over_turns-critic", "gpg-nonzero"}
FOLLOW_A_SHIFT |= {"optimal_token_baseline", "otb-weighed"}  # at the end of the longest row
FOLLOW_A_SCALE = {"dr_grpo", "rloo", "opo", "reinforce", "remax", "batch-rloo", "raw", "gae-raw", "function"}
FOLLOW_A_SCALE |= {"gae-vapo", "gae_over_turns-raw", "gae_over_turns-critic", "gpg", "gpg-nonzero", "pass_at_k"}
FOLLOW_A_SCALE |= {"optimal_token_baseline", "otb-tail", "otb-weighed"}
FOLLOW_A_SCALE |= {"hierarchical_grpo-mean"}
ON_TWO_LEVELS = {"hierarchical_grpo", "hierarchical_grpo-mean"}
SOME_TOKENS = {"pass_at_k", "pass_at_k-scaled", "otb-tail"}
# Means over tokens, in which a row without one weighs nothing, and the only row with some is its own mean.
OVER_TOKENS = {"opo", "optimal_token_baseline", "otb-weighed", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}
OVER_TOKENS |= {"rpp-discounted", "gae", "gae_over_turns", "gae-relative"}
"""Teach nothing at some tokens of groups with different rewards: not the best row, or a step that one row has."""


def advantages(name: str, view: LossView, **changes: Any) -> Tensor:
    return ESTIMATOR_EXAMPLES[name](signal_of(view, turn_rewards=name in ON_TWO_LEVELS, **changes)).advantages


def both(name: str, view: LossView) -> list[Tensor]:
    found = ESTIMATOR_EXAMPLES[name](signal_of(view, turn_rewards=name in ON_TWO_LEVELS))
    return [found.advantages] if found.returns is None else [found.advantages, found.returns]


def rewarded_differently(view: LossView, rows_of: Tensor, seed: int = 2) -> LossView:
    draw = torch.Generator().manual_seed(seed)
    other = torch.randn(len(view), generator=draw, dtype=torch.float64) * 5
    return view.replace(rewards=torch.where(rows_of, other, view.rewards))


@each
@given(view=views())
@few
def test_i_01_purity(name: str, view: LossView) -> None:
    before, versions = [tensor.clone() for _, tensor in view.tensors()], tensor_versions(view)
    first, second = both(name, view), both(name, view)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert tensor_versions(view) == versions
    assert all(torch.equal(tensor, old) for (_, tensor), old in zip(view.tensors(), before, strict=True))


@every
@given(view=views(), poison=st.sampled_from([None, math.nan, math.inf, -math.inf]))
@some
def test_i_02_masked_values_take_no_part_even_if_they_are_poison(
    name: str, view: LossView, poison: float | None
) -> None:
    ours, theirs = both(name, disturbed(view, poison)), both(name, view)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert not any(one[~view.valid_tokens].any() for one in ours)


@each
@given(view=views(), place=st.integers(0, 6))
@some
def test_i_03_masked_tokens_may_be_inserted(name: str, view: LossView, place: int) -> None:
    agree([without_columns(one, place) for one in both(name, inserted(view, place))], both(name, view))


@every
@given(view=views(), seed=st.integers(0, 99))
@some
def test_i_07_rows_may_come_in_any_order(name: str, view: LossView, seed: int) -> None:
    order = torch.randperm(len(view), generator=torch.Generator().manual_seed(seed))
    agree(both(name, view.select(order)), [one[order] for one in both(name, view)])


@each
@given(view=views())
@some
def test_i_11_advantages_are_where_the_valid_tokens_of_a_spread_group_are(name: str, view: LossView) -> None:
    estimator = ESTIMATOR_EXAMPLES[name]
    if name in OVER_TOKENS:
        view = view.replace(rewarded=view.rewarded & view.valid_tokens.any(-1))
    noise = torch.rand(len(view), generator=torch.Generator().manual_seed(4), dtype=torch.float64) + 0.5
    varied = view.replace(rewards=torch.where(view.groups == 1, 2.0, noise))  # group 1 is constant
    spread = group_statistics(varied.rewards, varied.groups, varied.rewarded).spread[:, None] & view.valid_tokens
    if name in ON_TWO_LEVELS:
        spread &= turn_numbers(view) == 1  # not those of attempts
    found = advantages(name, varied)
    assert not found[~view.valid_tokens].any()
    if name in SOME_TOKENS:
        assert estimator.per_token or not found[~spread].any()
    elif estimator.compares and not estimator.per_token:
        assert torch.equal(found != 0, spread)
    else:
        assert found[spread].all()


@every
@given(view=views(), columns=st.integers(0, 3), more=st.integers(0, 3))
@some
def test_i_14_padding_changes_nothing(name: str, view: LossView, columns: int, more: int) -> None:
    wide = view.fit_width(view.width + columns)
    padded = both(name, joined(wide, wide.padding_rows(more)))
    for ours, theirs in zip(padded, both(name, view), strict=True):
        agree(ours[: len(view), : view.width], theirs)
        assert not ours[len(view) :].any() and not ours[:, view.width :].any()


@each
@given(view=views())
@some
def test_i_16_statistics_of_float32_rewards_are_exact(name: str, view: LossView) -> None:
    single = view.map(lambda tensor, _axis, _pad: tensor.float() if tensor.dtype == torch.float64 else tensor)
    exact = single.map(lambda tensor, _axis, _pad: tensor.double() if tensor.dtype == torch.float32 else tensor)
    found = advantages(name, single)
    assert found.dtype == torch.float32
    agree(found.double(), advantages(name, exact), 2e-5)


@every
@given(view=views(), group=st.integers(0, 2))
@some
def test_i_19_groups_are_isolated(name: str, view: LossView, group: int) -> None:
    elsewhere = view.groups != group
    plain, moved = advantages(name, view), advantages(name, rewarded_differently(view, elsewhere))
    if name not in BATCH_WIDE:
        assert torch.equal(plain[~elsewhere], moved[~elsewhere])


def test_what_an_estimator_declares_is_tested_to_be_true() -> None:
    for name, estimator in ESTIMATOR_EXAMPLES.items():
        assert not (estimator.within_groups and name in BATCH_WIDE), name
        assert not (estimator.shift_invariant and name in FOLLOW_A_SHIFT), name


@pytest.mark.parametrize("name", sorted(BATCH_WIDE))
def test_i_19_what_is_said_to_have_a_statistic_of_the_batch_has_one(name: str) -> None:
    other = WITNESS.groups == 1
    changes = rewarded_differently(WITNESS, other), WITNESS.replace(rewards=torch.where(other, 1.0, WITNESS.rewards))
    plain, *moved = (advantages(name, view)[WITNESS.groups == 0] for view in (WITNESS, *changes))
    assert not all(torch.allclose(plain, one) for one in moved)


@each
@given(view=views(), shift=st.sampled_from([-3.0, 0.5, 2.0**12]))
@some
def test_i_19_a_shift_of_all_rewards_changes_what_it_should(name: str, view: LossView, shift: float) -> None:
    view = view.replace(rewarded=view.trained, returns=torch.zeros_like(view.logprobs))
    moved = advantages(name, view.replace(rewards=view.rewards + shift))
    if name not in FOLLOW_A_SHIFT:
        agree(moved, advantages(name, view), 1e-8)


@pytest.mark.parametrize("name", sorted(FOLLOW_A_SHIFT))
def test_i_19_what_is_said_to_follow_a_shift_does(name: str) -> None:
    assert not torch.allclose(advantages(name, WITNESS), advantages(name, WITNESS.replace(rewards=WITNESS.rewards + 3)))


@each
@given(view=views(), scale=st.sampled_from([0.5, 8.0]))
@some
def test_i_19_a_scale_of_all_rewards_changes_what_it_should(name: str, view: LossView, scale: float) -> None:
    nothing = torch.zeros_like(view.logprobs)
    view = view.replace(returns=nothing, values=nothing)
    greedy = view.extras["greedy_score"]
    plain, moved = (
        advantages(name, view),
        advantages(name, view.replace(rewards=view.rewards * scale), greedy=greedy * scale),
    )
    expected = plain * scale if name in FOLLOW_A_SCALE else plain
    agree(moved, expected, 1e-5)  # an epsilon of 1e-6 beside a deviation of at least 0.1 does not scale


@each
@given(view=views())
@some
def test_i_19b_the_reward_of_a_row_outside_rewarded_moves_nothing(name: str, view: LossView) -> None:
    moved = rewarded_differently(view, ~view.rewarded)
    scores = {"scores": torch.where(view.rewarded, view.rewards, math.nan)}
    assert torch.equal(advantages(name, moved), advantages(name, view))
    if not ESTIMATOR_EXAMPLES[name].per_token:  # the others see the score at the last valid token
        assert torch.equal(advantages(name, view, **scores), advantages(name, view))


@pytest.mark.parametrize("correction", corrections_with("reward_mask", "exclude"), ids=name_of)
@each
def test_i_19b_nor_does_that_of_a_row_that_a_correction_takes_out(name: str, correction: RLCallback) -> None:
    corrections = Corrections([correction])

    def through(view: LossView) -> Tensor:
        masked = view.replace(rewarded=view.rewarded & corrections.reward_mask(view))
        kept = exclude_rows(masked, corrections)[0]
        return estimate_signal(kept, ESTIMATOR_EXAMPLES[name], corrections)[0].require("advantages")

    truncated = WITNESS.rewarded & ~corrections.reward_mask(WITNESS)
    assert truncated.any() and not truncated.all()
    assert torch.equal(through(rewarded_differently(WITNESS, truncated)), through(WITNESS))


@pytest.mark.parametrize("name", [name for name, one in ESTIMATOR_EXAMPLES.items() if one.compares or name in WHITENED])
@given(view=views(), constant=st.sampled_from([1.1, -2.7, 1e6 + 0.1]))
@some
def test_i_21_equal_rewards_teach_an_estimator_that_compares_exactly_nothing(
    name: str, view: LossView, constant: float
) -> None:
    single = view.replace(rewards=torch.full((len(view),), constant), returns=torch.zeros(view.valid_tokens.shape))
    assert not advantages(name, single).any()


@each
@given(given_rows=rows(kinds=["empty", "masked", "dropped", "padding"], most=3))
@few
def test_i_23_rows_without_a_token_are_no_error(name: str, given_rows: list) -> None:
    assert not any(one.any() for one in both(name, view_of_rows(given_rows)))


@each
@given(view=views(kinds=["full", "holes"], fewest=1, most=1))
@few
def test_i_23_a_group_of_one_teaches_nothing_to_who_compares(name: str, view: LossView) -> None:
    found = advantages(name, view.replace(returns=torch.zeros_like(view.logprobs)))
    assert found.isfinite().all()
    if ESTIMATOR_EXAMPLES[name].compares:
        assert not found.any()


@given(view=views(), penalty=st.sampled_from([0.0, 0.5]))
@some
def test_i_24_reward_is_conserved(view: LossView, penalty: float) -> None:
    given = callback_of("penalty", token_reward=lambda rollout: -penalty * rollout.require("ref_logprobs"))
    plain = view.replace(values=torch.zeros_like(view.logprobs))
    corrections = Corrections([given])
    found, *_ = estimate_signal(plain, GAE(whitened=False), corrections)
    task = torch.where(view.rewarded & view.valid_tokens.any(-1), view.rewards, 0.0)
    total = task - penalty * torch.where(view.valid_tokens, view.require("ref_logprobs"), 0.0).sum(-1)
    first = view.valid_tokens & (view.valid_tokens.cumsum(-1) == 1)
    placed = torch.where(first, found.require("returns"), 0.0).sum(-1)
    assert_close(placed, total)
    greedy = torch.where(view.rewarded, view.extras["greedy_score"], 0.0)
    remax, *_ = estimate_signal(plain, ReMax(), corrections)
    assert_close(torch.where(first, remax.require("advantages"), 0.0).sum(-1), total - greedy * first.any(-1))


@each
@given(view=views())
@few
def test_i_27_a_batch_twice_over_has_the_same_advantages(name: str, view: LossView) -> None:
    if name in BATCH_WIDE:
        view = view.replace(returns=torch.zeros_like(view.logprobs))
    once, double = advantages(name, view), advantages(name, twice(view))
    assert torch.equal(double[: len(view)], double[len(view) :])
    if name not in BATCH_WIDE:  # n - 1 of twice the batch is not twice n - 1
        agree(double[: len(view)], once)
