"""EnvironmentReward: what the environment gave, nothing else for those who said nothing."""

import pytest

from lightning_rl.environments import EnvironmentReward


@pytest.mark.parametrize(
    ("nothing", "expected"),
    [(0.0, [1.0, 0.0, None, 2.0]), (-1.0, [1.0, -1.0, None, 2.0]), (None, [1.0, None, None, 2.0])],
)
def test_who_said_nothing_has_no_reward_but_what_the_environment_gave(
    nothing: float | None, expected: list[float | None]
) -> None:
    """An answer that was rewarded, one that was not, none at all, and none that was rewarded all the same."""
    rewards = EnvironmentReward(nothing)(
        ["?"] * 4, [""] * 4, completion_ids=[[5], [6], [], []], environment_reward=[1.0, None, None, 2.0]
    )
    assert rewards == expected
