"""From rewards to advantages: raw stays raw, masks mask, and what is not finite is named."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from kit.scores import scores_of
from kit.support import callback_of, fit, parity_reward, ragged_rollout, recorder, rollout_of, tiny_module, weights_of
from properties.exports import ESTIMATOR_EXAMPLES
from torch import Tensor
from torch.testing import assert_close
from typing_extensions import override

from lightning_rl import GAE, GRPO, RLOO, FinishReason, RawReward, Rollout
from lightning_rl.advantages import Advantages, Estimator, RewardSignal, RowFunction, resolve_advantages
from lightning_rl.callbacks import AdaptiveKL, NoEOSMask, OverlongPenalty, ReferenceKL
from lightning_rl.corrections import Corrections, RLCallback, Stat
from lightning_rl.rollout import SUM_PI_SQUARED
from lightning_rl.rollouts.estimate_signal import estimate_signal, exclude_rows
from lightning_rl.signal.discounted_returns import gae

NAN, INF = math.nan, math.inf
PLAIN = GAE(whitened=False)


def signal(
    rollout: Rollout, estimator: Estimator | RowFunction, *callbacks: RLCallback
) -> tuple[Tensor, dict[str, float], Rollout]:
    found, _, stats = estimate_signal(rollout, resolve_advantages(estimator), Corrections(callbacks))
    return found.require("advantages"), {name: float(stat.value()) for name, stat in stats.items()}, found


def without_eos(rollout: Rollout, action: Any = "zero_reward") -> tuple[Rollout, dict[str, Stat]]:
    """The rollout as drawing and planning hand it on under NoEOSMask."""
    corrections = Corrections([NoEOSMask(action)])
    masked = rollout.replace(rewarded=rollout.rewarded & corrections.reward_mask(rollout))
    return exclude_rows(masked, corrections)


@pytest.mark.parametrize("estimator", [GRPO(), RLOO(), RawReward(), PLAIN])
@pytest.mark.parametrize("other", [1.0, 100.0, NAN])
def test_a_row_without_eos_enters_no_reward_statistic(estimator: Any, other: float) -> None:
    rollout = rollout_of([1.0, 1.0, other], [[1, 1, 0], [1, 0, 0], [1, 1, 1]], finish=[0, 0, FinishReason.LENGTH])
    masked, _ = without_eos(rollout.replace(finish=rollout.finish.to(torch.uint8)))
    advantages, stats, found = signal(masked, estimator)
    expected = 0.0 if estimator in (GRPO(), RLOO()) else 1.0
    assert advantages.tolist() == [[expected, expected, 0], [expected, 0, 0], [0, 0, 0]]
    assert stats["reward/task"] == 1.0 and stats["reward/missing"] == pytest.approx(1 / 3)
    assert found.valid_tokens.sum() == 6  # its tokens stay in the denominators


def test_dropping_the_tokens_takes_the_row_out_of_everything() -> None:
    finish = torch.tensor([FinishReason.STOP, FinishReason.LENGTH], dtype=torch.uint8)
    rollout, stats = without_eos(rollout_of([1.0, 5.0], [[1, 1], [1, 1]], finish=finish), "drop_tokens")
    assert rollout.trained.tolist() == rollout.rewarded.tolist() == [True, False]
    assert rollout.valid_tokens.tolist() == [[True, True], [False, False]]
    assert float(stats["no_eos_mask/excluded"].value()) == 0.5
    assert rollout.action_mask.all()


def test_masks_are_derived_each_from_the_one_before() -> None:
    rollout = rollout_of([1.0] * 4, [[1, 1]] * 3 + [[1, 0]], sample_ids=[0, -1, 2, 3])
    rollout = rollout.replace(rewarded=torch.tensor([True, True, True, False]))
    drop = callback_of("drop", exclude=lambda seen: seen.sample_ids == 2)
    found, stats = exclude_rows(rollout, Corrections([drop]))
    assert found.trained.tolist() == [True, False, False, True]
    assert found.rewarded.tolist() == [True, False, False, False]
    assert found.valid_tokens.tolist() == [[True, True], [False] * 2, [False] * 2, [True, False]]
    assert float(stats["drop/excluded"].value()) == pytest.approx(1 / 3)
    untouched, nothing = exclude_rows(rollout, Corrections())
    assert untouched.trained.tolist() == [True, False, True, True] and nothing == {}


def test_bonuses_join_the_task_reward_and_leave_it_raw() -> None:
    bonus = callback_of("bonus", reward_bonus=lambda _: torch.tensor([0.5, 0.0, -3.0]))
    rollout = rollout_of([1.0, 1.0, 1.0], [[1], [1], [1]])
    rollout = rollout.replace(rewarded=torch.tensor([True, True, False]))
    advantages, stats, found = signal(rollout, RLOO(), bonus)
    assert advantages.tolist() == [[0.5], [-0.5], [0.0]]
    assert stats["reward/task"] == 1.0 and stats["reward/shaped"] == pytest.approx(-0.5 / 3)
    assert found.rewards.tolist() == [1.0, 1.0, 1.0] and found.returns is None


def test_outside_rewarded_only_the_task_part_is_zero() -> None:
    bonus = callback_of("bonus", reward_bonus=lambda _: torch.tensor([-0.5, 0.0]))
    rollout = rollout_of([7.0, 1.0], [[1, 1], [1, 1]]).replace(
        rewarded=torch.tensor([False, True]), values=torch.zeros(2, 2)
    )
    found = signal(rollout, GAE(whitened=False), bonus)[2]
    assert found.require("returns").tolist() == [[-0.5, -0.5], [1.0, 1.0]]


@pytest.mark.parametrize("estimator", [GRPO(), RLOO(), RawReward(), PLAIN, GAE()])
@pytest.mark.parametrize("poison", [NAN, INF])
def test_a_bonus_that_is_not_finite_raises_and_names_the_sample(estimator: Any, poison: float) -> None:
    bonus = callback_of("bonus", reward_bonus=lambda seen: torch.where(seen.sample_ids == 102, poison, 0.0))
    rollout = rollout_of([1.0, 0.0, 2.0], [[1, 1], [1, 1], [1, 1]])
    with pytest.raises(ValueError, match="for sample 102"):
        signal(rollout, estimator, bonus)


@pytest.mark.parametrize("estimator", [PLAIN, GAE()])
def test_a_token_reward_that_is_not_finite_raises_and_names_the_sample_and_the_position(estimator: Any) -> None:
    broken = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, NAN]])
    rollout = rollout_of([1.0, 0.0, 2.0], [[1, 1], [1, 1], [1, 1]])
    with pytest.raises(ValueError, match=r'for sample 102 at position 1: .* of "penalty"'):
        signal(rollout, estimator, callback_of("penalty", token_reward=lambda _: broken))


@pytest.mark.parametrize("poison", [NAN, INF])
def test_an_advantage_that_is_not_finite_raises_and_names_the_sample(poison: float) -> None:
    rollout = rollout_of([1.0, 0.0, 2.0], [[1, 1], [1, 1], [1, 1]])
    values = rollout.require("values") + torch.tensor([[0.0, 0.0], [0.0, poison], [0.0, 0.0]])
    with pytest.raises(ValueError, match=r"expected finite .* for sample 101"):
        signal(rollout.replace(values=values), PLAIN)
    with pytest.raises(
        ValueError, match=r"advantages from the estimator <lambda>, got .* for sample 102 at position 0"
    ):
        signal(rollout, lambda scores, _groups, _rewarded: torch.where(scores == 2, poison, scores))


def test_the_kl_penalty_is_what_kl_corrections_subtract_and_other_token_rewards_have_their_own_names() -> None:
    rollout = rollout_of([1.0], [[1, 1, 0]])
    old = torch.tensor([[-1.0, -1.0, NAN]])
    rollout = rollout.replace(old_logprobs=old, ref_logprobs=old - 0.5, values=torch.zeros(1, 3))
    callbacks = [ReferenceKL(0.1), AdaptiveKL(0.2, horizon=10)]
    others = [callback_of(name, token_reward=lambda seen: torch.full(seen.response_ids.shape, 0.25)) for name in "pq"]
    _, stats, _ = signal(rollout, GAE(), *callbacks, *others)
    assert stats["kl/penalty"] == pytest.approx(0.3 * 0.5)
    assert stats["p/token_reward"] == stats["q/token_reward"] == 0.25
    _, stats, _ = signal(rollout, GAE(), *others)
    assert "kl/penalty" not in stats


class Counted(Estimator):
    """Returns whole numbers."""

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        return Advantages(signal.valid_tokens.long())


def test_advantages_of_another_dtype_or_with_a_gradient_are_refused() -> None:
    rollout = rollout_of([1.0, 0.0, 2.0], [[1, 1], [1, 1], [1, 1]])
    with pytest.raises(
        ValueError, match=r"estimator Counted to return a float tensor \[3, 2\], got torch.int64 \[3, 2\]"
    ):
        signal(rollout, Counted())
    with pytest.raises(ValueError, match="advantages from the estimator <lambda> without gradient, got one: detach"):
        signal(rollout, lambda scores, *_: scores * torch.ones((), requires_grad=True))


@pytest.mark.parametrize("estimator", [GRPO(), RLOO(), RawReward(), PLAIN, GAE()])
def test_poison_where_nothing_counts_reaches_nothing(estimator: Any) -> None:
    rollout = ragged_rollout()  # NaN at every invalid token of every field
    rewarded = torch.arange(12) % 5 != 3
    rollout = rollout.replace(rewarded=rewarded, rewards=torch.where(rewarded, rollout.rewards, NAN))
    teacher = callback_of(
        "teacher", provide=lambda seen: {"token_extras/teacher": torch.where(seen.valid_tokens, 1.0, INF)}
    )
    penalty = callback_of("penalty", token_reward=lambda seen: torch.where(seen.valid_tokens, -0.1, NAN))
    callbacks = [teacher, penalty] if resolve_advantages(estimator).per_token else [teacher]
    advantages, stats, found = signal(rollout, estimator, *callbacks)
    assert advantages.isfinite().all() and not advantages[~rollout.valid_tokens].any()
    assert all(math.isfinite(value) for value in stats.values())
    per_token = [found.rollout_logprobs, found.old_logprobs, found.values, found.token_extras["teacher"], found.returns]
    assert all(tensor.isfinite().all() for tensor in per_token if tensor is not None)


def test_sanitising_changes_no_valid_token_and_no_integer() -> None:
    rollout = ragged_rollout().replace(token_extras={"routes": torch.full((12, 7, 2), NAN), "ids": torch.ones(12, 7)})
    found = rollout.sanitize()
    mask = rollout.valid_tokens
    assert torch.equal(found.require("values")[mask], rollout.require("values")[mask])
    assert not found.require("values")[~mask].any()
    assert found.token_extras["routes"][mask].isnan().all() and not found.token_extras["routes"][~mask].any()
    assert found.response_ids is rollout.response_ids and found.valid_tokens is mask


def test_what_is_logged_of_rewards_lengths_and_groups() -> None:
    rollout = rollout_of(
        [1.0, 0.0, 2.0, 2.0, 7.0, 5.0],
        [[1, 1]] * 5 + [[1, 0]],
        groups=[0, 0, 1, 1, 2, 3],
        sample_ids=[0, 1, 2, 3, 4, -1],
    )
    truncated = torch.tensor([0, 1, 0, 0, 0, 1], dtype=torch.uint8)
    rollout = rollout.replace(finish=truncated, response_lengths=rollout.response_lengths * 2)  # as much again is read
    rollout, _ = exclude_rows(rollout, Corrections())
    names = {"accuracy": torch.tensor([1.0, NAN, 0.0, 1.0, 1.0, 9.0])}
    advantages, stats, _ = signal(rollout.replace(rewards_by_function=names), RLOO())
    expected = {
        "reward/task": 12 / 5,
        "reward/accuracy": 3 / 4,
        "reward/shaped": 12 / 5,
        "reward/missing": 0,
        "length/mean": 2,
        "length/max": 2,
        "length/truncated": 1 / 5,
        "groups/zero_variance": 2 / 3,
        "advantage/mean": 0,
        "advantage/max": 1,
    }
    assert {name: stats[name] for name in expected} == pytest.approx(expected)
    assert stats["advantage/std"] == pytest.approx(float(advantages[:5].std()))
    assert set(stats) == {*expected, "advantage/std"}


def test_a_token_estimator_sees_values_and_returns_what_the_critic_should_learn() -> None:
    rollout = ragged_rollout(dtype=torch.float64).sanitize()
    advantages, _, found = signal(rollout, GAE(whitened=False, gamma=0.9, lam=0.8))
    task = torch.zeros_like(advantages)
    for row, score in enumerate(rollout.rewards):
        steps = rollout.valid_tokens[row].nonzero().flatten()
        task[row, steps[-1:]] = score
    assert_close(advantages, gae(task, rollout.require("values"), rollout.valid_tokens, gamma=0.9, lam=0.8))
    assert_close(found.require("returns"), advantages + rollout.require("values"))


@pytest.mark.parametrize("advantages", ["grpo", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_large_constant_in_every_reward_changes_no_update(advantages: str) -> None:
    def far(*args: Any, **columns: Any) -> list[float]:
        return [1e8 + value for value in parity_reward(*args, **columns)]

    options: dict[str, Any] = {"advantages": advantages, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    near, moved = (tiny_module(rewards=reward, **options) for reward in (parity_reward, far))
    seen: list[Rollout] = []
    for module in (near, moved):
        fit(module, max_steps=2, callbacks=[recorder(seen)("seen")])
    first, second, *others = (rollout.require("advantages") for rollout in seen)
    assert first.any() and second.any() and seen[0].rewards.dtype == torch.float64
    assert_close(others, [first, second], atol=1e-6, rtol=0)
    assert_close(weights_of(moved), weights_of(near), atol=1e-6, rtol=0)


HALVES: dict[str, list[tuple[float, bool]]] = {  # weights and whether an odd row, else an even one, earns them
    "seven and one": [(0.7, True), (0.1, True), (0.6, False), (0.2, False)],
    "ten tenths": [*[(0.1, True)] * 10, (1.0, False)],
    "to nothing": [(0.1, True), (0.2, True), (-0.3, True)],
    "thirds": [(1 / 3, True), (1 / 3, True), (2 / 3, False)],
    "products": [(0.1, True), (0.1, True), (0.1, True), (0.15, False), (0.15, False)],
}
COMPARING = [name for name, one in ESTIMATOR_EXAMPLES.items() if one.shift_invariant and one.compares]
WHITENED = ["reinforce_plus_plus_baseline", "batch", "batch-rloo", "lite-ppo", "scaled"]


def halves(weights: list[tuple[float, bool]]) -> dict[str, Any]:
    """Reward functions, of which odd and even rows earn equal weighted sums."""

    def earn(prompts: Any, completions: Any, *, odd: bool, **_: Any) -> list[float]:
        return [float(row % 2 == odd) for row in range(len(prompts))]

    return {f"reward_{place}": (partial(earn, odd=odd), weight) for place, (weight, odd) in enumerate(weights)}


def rollout_of_totals(weights: list[tuple[float, bool]], rows: int = 8) -> Rollout:
    """Two groups whose rows have equal totals."""
    ids = [[1, 2]] * rows
    totals = scores_of(halves(weights), range(rows), [""] * rows, completion_ids=ids, columns={}).total
    rollout = rollout_of(totals.tolist(), ids, groups=[row // 4 for row in range(rows)]).replace(rewards=totals)
    old = torch.full(rollout.response_ids.shape, -1.0)
    squares = {SUM_PI_SQUARED: torch.full_like(old, 0.5)}
    return rollout.replace(old_logprobs=old, rollout_logprobs=old, token_extras=squares)


@pytest.mark.parametrize("weights", HALVES)
@pytest.mark.parametrize("estimator", sorted({*COMPARING, *WHITENED}))
def test_totals_that_are_equal_up_to_rounding_have_no_advantage(estimator: str, weights: str) -> None:
    advantages, stats, _ = signal(rollout_of_totals(HALVES[weights]), ESTIMATOR_EXAMPLES[estimator])
    assert not advantages.any() and stats["groups/zero_variance"] == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("rewards", "bonuses"), [([0.3, 0.1], [-0.2, 0.0]), ([0.7, 0.6], [0.1, 0.2]), ([0.3, 0.0], [-0.3, 0.0])]
)
def test_scores_that_are_equal_up_to_rounding_have_no_advantage(
    rewards: list[float], bonuses: list[float], dtype: torch.dtype
) -> None:
    rollout = rollout_of(rewards * 4, [[1, 2]] * 8, groups=[0] * 4 + [1] * 4)
    rollout = rollout.replace(rewards=torch.tensor(rewards * 4, dtype=torch.float64))
    half = torch.tensor(bonuses * 4, dtype=dtype) / 2
    callbacks = [callback_of(name, reward_bonus=lambda _: half) for name in ("first", "second")]
    for estimator in (GRPO(epsilon=0.0), ESTIMATOR_EXAMPLES["reinforce_plus_plus_baseline"]):
        advantages, stats, _ = signal(rollout, estimator, *callbacks)
        assert not advantages.any() and stats["groups/zero_variance"] == 1.0


def test_a_penalty_that_makes_scores_equal_leaves_no_advantage() -> None:
    rollout = rollout_of([0.5, 0.4, 0.2], [[1] * 7 + [0] * 3, [1] * 8 + [0] * 2, [1] * 10])
    rollout = rollout.replace(rewards=torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64))
    advantages, _, _ = signal(rollout, GRPO(epsilon=0.0), OverlongPenalty(10, 10, coef=1.0))
    expected = torch.tensor([0.2 - 0.7, 0.3 - 0.8, 0.5 - 1.0])
    assert expected.std() < 1e-6 and not advantages.any()


@pytest.mark.parametrize("span", [1e-3, 0.01, 0.25])
def test_small_differences_beside_a_large_part_have_advantages(span: float) -> None:
    def rewards(value: float) -> list[float]:
        return [value, 0.0, value, 2 * value]

    constant = torch.full((4,), 1e8, dtype=torch.float64)
    rollout = rollout_of([0.0] * 4, [[1, 2]] * 4)
    near = rollout.replace(rewards=torch.tensor(rewards(1.0), dtype=torch.float64))
    far = rollout.replace(rewards=torch.tensor(rewards(span), dtype=torch.float64))
    expected, _, _ = signal(near, GRPO(epsilon=0.0))
    found, stats, _ = signal(far, GRPO(epsilon=0.0), callback_of("constant", reward_bonus=lambda _: constant))
    assert_close(found, expected, atol=1e-3, rtol=0)
    assert stats["groups/zero_variance"] == 0.0


@pytest.mark.parametrize("bonus", [0.0, 0.25])
@pytest.mark.parametrize("estimator", COMPARING)
def test_a_large_offset_of_all_rewards_keeps_their_differences(estimator: str, bonus: float) -> None:
    rewards = torch.tensor([0.0, 1.0, 0.5, 2.0] * 2, dtype=torch.float64)
    rollout = rollout_of_totals([(1.0, True)])
    added = callback_of("added", reward_bonus=lambda shown: bonus * (shown.sample_ids % 2).double())
    near, far = (
        signal(rollout.replace(rewards=rewards + at), ESTIMATOR_EXAMPLES[estimator], added) for at in (0, 1e12)
    )
    assert near[0].any()
    assert_close(far[0], near[0], atol=1e-3, rtol=0)


@pytest.mark.parametrize("advantages", ["reinforce_plus_plus_baseline", GRPO(epsilon=0.0)])
def test_a_run_with_equal_totals_changes_nothing(advantages: Any) -> None:
    module = tiny_module(rewards=halves(HALVES["seven and one"]), advantages=advantages)
    seen: list[Rollout] = []
    fit(module, max_steps=1, callbacks=[recorder(seen)("seen")])
    assert not seen[0].require("advantages").any()
    assert module.run.metrics.values()["groups/zero_variance"] == 1.0
