"""DynamicSampling: groups whose rewards are all the same are filtered, counted and replaced."""

from collections.abc import Sequence
from typing import Any

import pytest
from kit.support import fill_rollout, fit, recorder, rollout_of, tiny_module

from lightning_rl import FakeEngine, PromptDataModule, RLCallback, Rollout, SamplingParams
from lightning_rl.callbacks import DynamicSampling, NoEOSMask, OverlongPenalty
from lightning_rl.corrections import Corrections
from lightning_rl.generation import Request
from lightning_rl.rewards import Rewards
from lightning_rl.rollouts.collector import Collector

G = 3


def answer(request: Request) -> list[int]:
    """One to three tokens, then EOS."""
    return [5] * (1 + request.sample_id % G) + [1]


def uneven_for(*firsts: int) -> Any:
    """A reward with spread for prompts of these first tokens, and 1 for all others."""

    def uneven(prompts: Sequence[Any], completions: Any, *, completion_ids: Sequence[Any], **_: Any) -> list[float]:
        pairs = zip(prompts, completion_ids, strict=True)
        return [float(len(ids)) if prompt[0] in firsts else 1.0 for prompt, ids in pairs]

    return uneven


def drawn(
    number: int, *callbacks: RLCallback, reward: Any, script: Any = answer, prompts: Sequence[int] = range(2, 15)
) -> tuple[Rollout, dict[str, float], int]:
    """The groups, their counts, and how many prompts were taken."""
    data = PromptDataModule([[first] for first in prompts], 1, shuffle=False)
    data.connect(None, None)
    collector = Collector(
        engine=FakeEngine(script), tokenizer=None, rewards=Rewards([reward]), corrections=Corrections(callbacks),
        sampling=SamplingParams(max_new_tokens=9, eos_token_ids=[1]), group_size=G, seed=0,
    )  # fmt: skip
    collector.engine.load_weights([], 0)
    rollout, stats = fill_rollout(collector, data.take, number)
    return rollout, {name: float(stat.value()) for name, stat in stats.items()}, data.position.cursor


def of_kept(counts: dict[str, float]) -> tuple[float, float]:
    return counts["groups/sampled"], counts["groups/filtered"]


def kept(rewards: list[float], *, groups: list[int] | None = None, **given: Any) -> list[bool]:
    rollout = rollout_of(rewards, [[1]] * len(rewards), groups=groups, **given)
    return DynamicSampling().keep_groups(rollout).tolist()


def test_a_group_of_equal_rewards_is_filtered_and_one_with_spread_kept() -> None:
    assert kept([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], groups=[0, 0, 1, 1, 2, 2]) == [False] * 2 + [True] * 2 + [False] * 2


@pytest.mark.parametrize(("gap", "expected"), [(1.5e-6, True), (1.3e-6, False), (0.0, False)])
def test_the_deviation_has_to_exceed_the_tolerance(gap: float, expected: bool) -> None:
    assert kept([0.0, gap]) == [expected] * 2  # the deviation is the gap over the root of 2


def test_equal_rewards_that_are_no_binary_fraction_have_no_spread() -> None:
    assert kept([0.1] * 7) == [False] * 7 and kept([1e6 + 0.1] * 7) == [False] * 7


def test_rows_without_reward_neither_save_nor_doom_their_group() -> None:
    assert kept([1.0, 1.0, 5.0], rewarded=[True, True, False]) == [False] * 3
    assert kept([1.0, 0.0, float("nan")], rewarded=[True, True, False]) == [True] * 3
    assert kept([1.0, 2.0], rewarded=[True, False]) == [False] * 2, "one reward has no spread"
    assert kept([1.0, 2.0], rewarded=[False, False]) == [False] * 2


def test_filtered_groups_are_replaced_and_every_group_drawn_is_counted() -> None:
    rollout, counts, taken = drawn(3, DynamicSampling(), reward=uneven_for(3, 5, 6))
    assert rollout.groups.tolist() == [1] * G + [3] * G + [4] * G
    assert of_kept(counts) == (5, 2) and taken == 5


def test_without_it_nothing_is_filtered() -> None:
    rollout, counts, taken = drawn(3, reward=uneven_for())
    assert len(rollout) == 3 * G and of_kept(counts) == (3, 0) and taken == 3


@pytest.mark.parametrize(("rounds", "taken"), [(1, 3), (2, 5), (4, 9)])
def test_the_bound_on_the_rounds_ends_refilling_with_a_warning(rounds: int, taken: int) -> None:
    with pytest.warns(UserWarning, match=f"2 groups are missing after {rounds} rounds of refilling"):
        rollout, counts, cursor = drawn(3, DynamicSampling(max_rounds=rounds), reward=uneven_for(2))
    assert rollout.groups.tolist() == [0] * G and cursor == taken
    assert of_kept(counts) == (taken, taken - 1)


def test_a_group_that_no_reward_applies_to_is_replaced() -> None:
    def sometimes(prompts: Sequence[Any], completions: Any, **given: Any) -> list[float | None]:
        known = uneven_for(3)(prompts, completions, **given)
        return [None if prompt[0] == 2 else value for prompt, value in zip(prompts, known, strict=True)]

    with pytest.warns(UserWarning, match="no reward function applies"):
        rollout, counts, _ = drawn(1, DynamicSampling(), reward=sometimes)
    assert rollout.groups.tolist() == [1] * G and counts["groups/filtered"] == 1.0


def test_spread_among_truncated_rows_alone_is_none_under_a_reward_mask() -> None:
    def cut(request: Request) -> list[int]:
        return [5] * 9 if request.sample_id % G == 2 else [5, 1]

    alone, _, _ = drawn(1, DynamicSampling(), reward=uneven_for(2), script=cut)
    assert alone.groups.tolist() == [0] * G, "its truncated row has another reward"
    with pytest.warns(UserWarning, match="1 groups are missing"):
        drawn(1, DynamicSampling(max_rounds=1), NoEOSMask(), reward=uneven_for(2), script=cut)


def test_a_bonus_gives_no_spread_to_a_group() -> None:
    with pytest.warns(UserWarning, match="1 groups are missing"):
        drawn(1, DynamicSampling(max_rounds=1), OverlongPenalty(9, 8), reward=uneven_for())


def test_in_a_fit_every_group_that_trains_has_spread() -> None:
    seen: list[Rollout] = []
    fit(tiny_module(group_size=2), callbacks=[DynamicSampling(), recorder(seen)("recorder")])
    assert len(seen) == 4 and all(len(rollout) == 8 for rollout in seen)
    assert all(int(rollout.rewards[row : row + 2].sum()) == 1 for rollout in seen for row in range(0, 8, 2))
