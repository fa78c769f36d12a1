"""RewardNormalization: the reward of a batch or group shifted and scaled, the raw one left as it is."""

import math
from typing import Any

import pytest
import torch
from kit.support import SummedBy, fit, in_lockstep, recorder, rollout_of, tiny_module
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import RawReward, RLCallback, Rollout
from lightning_rl.callbacks import NoEOSMask, OverlongPenalty, RewardNormalization
from lightning_rl.corrections import Corrections
from lightning_rl.rollout import concatenate
from lightning_rl.rollouts.estimate_signal import estimate_signal
from lightning_rl.signal.masked import GlobalSum

REWARDS, GROUPS = [1.0, 3.0, 5.0, 5.0], [0, 0, 1, 1]
BATCH_STD = math.sqrt((2.5**2 + 0.5**2 + 1.5**2 + 1.5**2) / 3)


def rollout(rewards: list[float] = REWARDS, **given: Any) -> Rollout:
    return rollout_of(rewards, [[1]] * len(rewards), **{"groups": GROUPS[: len(rewards)], **given})


def scored(rows: Rollout, *callbacks: RLCallback) -> tuple[Tensor, dict[str, float]]:
    """The score of each row, and the logged figures."""
    corrections = Corrections(callbacks)
    found, _, stats = estimate_signal(rows, RawReward(), corrections)
    stats |= corrections.rollout_metrics(rows)
    return found.require("advantages")[:, 0], {name: stat.value() for name, stat in stats.items()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, [-2.5 / BATCH_STD, -0.5 / BATCH_STD] + [1.5 / BATCH_STD] * 2, id="batch"),
        pytest.param({"mean": "group"}, [-1 / BATCH_STD, 1 / BATCH_STD, 0.0, 0.0], id="group-over-batch"),
        pytest.param({"mean": "group", "std": "group"}, [-(0.5**0.5), 0.5**0.5, 0.0, 0.0], id="group"),
        pytest.param({"mean": "group", "std": "group", "unbiased": False}, [-1.0, 1.0, 0.0, 0.0], id="biased"),
        pytest.param({"mean": "group", "std": "none"}, [-1.0, 1.0, 0.0, 0.0], id="group-mean"),
        pytest.param(
            {"mean": "group", "std": "none", "leave_one_out": True}, [-2.0, 2.0, 0.0, 0.0], id="leave-one-out"
        ),
        pytest.param(
            {"std": "none", "leave_one_out": True}, [1 - 13 / 3, 3 - 11 / 3, 5 - 3.0, 5 - 3.0], id="of-the-batch"
        ),
        pytest.param({"mean": "none"}, [reward / BATCH_STD for reward in REWARDS], id="no-mean"),
    ],
)
def test_levels_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    assert_close(scored(rollout(), RewardNormalization(**options))[0], torch.tensor(expected), atol=2e-6, rtol=0)


def test_the_raw_reward_stays_and_the_new_one_is_logged_beside_it() -> None:
    rows = rollout()
    scores, logged = scored(rows, RewardNormalization("group", "none"))
    assert logged["reward/task"] == 3.5 and rows.rewards.tolist() == REWARDS
    assert logged["reward/shaped"] == logged["reward_normalization/reward"] == float(scores.mean()) == 0.0
    assert logged["reward_normalization/clipped"] == 0.0


def test_epsilon_joins_the_deviation() -> None:
    scores, _ = scored(rollout([1.0, 3.0], groups=[0, 0]), RewardNormalization("group", "group", epsilon=1.0))
    assert_close(scores, torch.tensor([-1.0, 1.0]) / (2**0.5 + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_offset_changes_nothing(dtype: torch.dtype) -> None:
    rewards, groups = torch.tensor([0.0, 1.0, 2.0, 5.0], dtype=dtype), torch.zeros(4, dtype=torch.int64)
    rows = rollout(groups=[0] * 4).replace(rewards=rewards, groups=groups)
    plain, _ = scored(rows, RewardNormalization())
    moved, _ = scored(rows.replace(rewards=rewards + 1e6), RewardNormalization())
    assert_close(moved, plain, atol=1e-7, rtol=0)


@pytest.mark.parametrize("level", ["batch", "group"])
@pytest.mark.parametrize("reward", [0.1, 1e6 + 0.1, -3.0])
def test_constant_rewards_become_0(level: Any, reward: float) -> None:
    scores, logged = scored(rollout([reward] * 4), RewardNormalization(level, level))
    assert scores.tolist() == [0.0] * 4 and logged["reward/task"] == pytest.approx(reward)


def test_rows_without_reward_get_no_bonus_and_move_no_other() -> None:
    rows = rollout([1.0, 3.0, math.nan, 7.0], groups=[0] * 4, rewarded=[True, True, False, False])
    callback = RewardNormalization()
    assert callback.replace_reward(rows)[2:].tolist() == [0.0, 0.0]
    scores, logged = scored(rows, callback)
    assert_close(scores, torch.tensor([-(0.5**0.5), 0.5**0.5, 0.0, 0.0]), atol=1e-6, rtol=0)
    assert logged["reward_normalization/reward"] == pytest.approx(0.0, abs=1e-12)
    truncated = rollout([1.0, 3.0, 9.0], groups=[0] * 3, finish=torch.tensor([0, 0, 1], dtype=torch.uint8))
    truncated = truncated.replace(rewarded=NoEOSMask().reward_mask(truncated))
    assert_close(scored(truncated, callback)[0], scores[:3], atol=1e-6, rtol=0)


def test_the_clip_bounds_what_comes_out_and_counts_what_it_changed() -> None:
    scores, logged = scored(rollout(), RewardNormalization("batch", "none", clip=1.5))
    assert scores.tolist() == [-1.5, -0.5, 1.5, 1.5]
    assert logged["reward_normalization/clipped"] == 0.25 and logged["reward_normalization/reward"] == 0.25


def test_bonuses_of_others_are_added_to_what_comes_out() -> None:
    rows = rollout_of([1.0, 3.0], [[1] * 10, [1] * 8 + [0] * 2], groups=[0, 0])
    scores, _ = scored(rows, RewardNormalization("group", "none"), OverlongPenalty(10, 4))
    assert scores.tolist() == [-2.0, 0.5]


def test_ranks_share_the_batch() -> None:
    parts = rollout([1.0, 3.0], groups=[0, 0]), rollout([5.0, 5.0, 9.0], groups=[1, 1, 1])

    def rank(rows: Rollout) -> Any:
        def normalized(global_sum: GlobalSum) -> Tensor:
            callback = RewardNormalization()
            callback.collectives = SummedBy(global_sum)
            return callback.replace_reward(rows)

        return normalized

    found = torch.cat(in_lockstep(*(rank(part) for part in parts)))
    assert_close(found, RewardNormalization().replace_reward(concatenate(parts)), atol=1e-12, rtol=0)


def test_a_critic_learns_the_normalised_reward() -> None:
    seen: list[Rollout] = []
    module = tiny_module(advantages="gae", critic="shared", group_size=2, minibatches_per_rollout=2)
    fit(module, callbacks=[RewardNormalization(), recorder(seen)("recorder")])
    for rows in seen:
        mean, std = rows.rewards.double().mean(), rows.rewards.double().std()
        expected = (rows.rewards - mean) / (std + 1e-6)
        first = rows.require("returns")[:, 0]  # lam=1: the whole reward of the row
        assert std > 0 and rows.valid_tokens[:, 0].all()
        assert_close(first, expected, atol=1e-5, rtol=0)
    assert len(seen) == 4


def test_a_greedy_baseline_is_refused_by_both_names() -> None:
    with pytest.raises(ValueError, match=r'advantages="remax" .* which RewardNormalization cannot normalize'):
        fit(tiny_module(advantages="remax"), callbacks=[RewardNormalization()])


def test_reward_functions_are_normalized_one_by_one_as_in_gdpo() -> None:
    parts = {"right": torch.tensor([0.0, 1.0, 1.0, 1.0]).double(), "form": torch.tensor([2.0, 6.0, 1.0, torch.nan])}
    rows = rollout().replace(rewards_by_function={name: part.double() for name, part in parts.items()})
    callback = RewardNormalization("group", "group", epsilon=0.0, weights={"right": 1.0, "form": 0.5})
    assert_close(scored(rows, callback)[0], torch.tensor([-1.5, 1.5, 0.0, 0.0]) * 0.5**0.5, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match=r"expected weights of RewardNormalization for right, form, got right"):
        scored(rows, RewardNormalization("group", "group", weights={"right": 1.0}))
