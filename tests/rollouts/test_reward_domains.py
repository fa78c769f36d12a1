"""Rewards outside of the domain of a correction or estimator end the run in the first rollout that has one."""

from typing import Any

import pytest
from kit.support import fit, parity_reward, tiny_module

from lightning_rl.callbacks import LinearLengthPenalty, OverlongPenalty, RewardNormalization, StopProperly
from lightning_rl.corrections import RLCallback
from lightning_rl.signal.reward_domain import RewardDomain


def rewards_of(wrong: float, right: float) -> Any:
    """A reward with these two values."""

    def reward(*args: Any, **columns: Any) -> list[float]:
        return [right if value else wrong for value in parity_reward(*args, **columns)]

    return reward


def own() -> RLCallback:
    callback = RLCallback().with_name("own")
    callback.domain = RewardDomain(0.5, "call the author")
    return callback


@pytest.mark.parametrize(
    ("options", "callbacks", "message"),
    [
        (
            {},
            [StopProperly()],
            "at least 0 for StopProperly, got -1 for sample .*: pass reward= not above the smallest",
        ),
        ({}, [StopProperly(0.9)], "at least 0 for StopProperly, got -1"),
        ({}, [StopProperly(reward=-0.5)], "at least -0.5 for StopProperly, got -1 for sample"),
        ({}, [StopProperly(reward=0.0)], "at least 0 for StopProperly, got -1 for sample"),
        (
            {},
            [LinearLengthPenalty()],
            "at least 0 for LinearLengthPenalty, got -1 for sample .*: add a constant to the",
        ),
        ({}, [LinearLengthPenalty(0.0, turns=0.1)], "at least 0 for LinearLengthPenalty, got -1"),
        (
            {"advantages": "maxrl"},
            [],
            "at least 0 for the estimator MaxRL, got -1 for sample .*: add a constant to the",
        ),
        ({}, [own()], "at least 0.5 for RLCallback, got -1 for sample .*: call the author"),
    ],
)
@pytest.mark.parametrize("right", [1.0, -1.0])
def test_a_reward_below_the_domain_ends_the_run(options: Any, callbacks: Any, message: str, right: float) -> None:
    with pytest.raises(ValueError, match=f"expected rewards of {message}"):
        fit(tiny_module(rewards=rewards_of(-1.0, right), **options), callbacks=callbacks, max_steps=1)


@pytest.mark.parametrize(
    ("callback", "cure"),
    [
        (OverlongPenalty(8, 7), "add a constant to the rewards"),
        (RewardNormalization("group", "none"), "remove RewardNormalization, which replaces the rewards, or use GRPO"),
        (RewardNormalization(), "remove RewardNormalization"),
        (StopProperly(reward=-1.0), "remove StopProperly"),
    ],
)
def test_a_score_below_the_domain_of_the_estimator_ends_the_run(callback: RLCallback, cure: str) -> None:
    with pytest.raises(ValueError, match=rf"expected rewards of at least 0 for the estimator MaxRL, got -.*: {cure}"):
        fit(tiny_module(advantages="maxrl", max_new_tokens=8), callbacks=[callback], max_steps=1)


@pytest.mark.parametrize(
    ("callbacks", "wrong"),
    [
        ([StopProperly()], 0.0),
        ([StopProperly(reward=-1.0), LinearLengthPenalty(0.0)], -1.0),
        ([StopProperly(reward=-0.3)], -0.1 * 3),  # rounding is no reward below
        ([StopProperly(1.0), OverlongPenalty(8, 4)], -1.0),
    ],
)
def test_rewards_of_the_domain_train(callbacks: Any, wrong: float) -> None:
    assert fit(tiny_module(rewards=rewards_of(wrong, 1.0)), callbacks=callbacks, max_steps=1).global_step == 1
