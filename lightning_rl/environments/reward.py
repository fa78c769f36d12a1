"""Reward of the environment as a reward function."""

from collections.abc import Sequence
from typing import Any

from lightning_rl.utils.arguments import check_numbers


class EnvironmentReward:
    """Sum of the rewards of a conversation's turns.

    Args:
        nothing: Reward of a conversation whose environment gave none, such as one that ends at a limit; None for no
            reward, so that it enters no statistic. A conversation without any answer never has a reward.

    Example:
        >>> EnvironmentReward()(["?"], ["4"], environment_reward=[1.0])
        [1.0]
    """

    def __init__(self, nothing: float | None = 0.0) -> None:
        check_numbers(finite=True, optional=True, nothing=nothing)
        self.nothing = nothing

    def __call__(
        self,
        prompts: Sequence[Any],  # noqa: ARG002  the signature of a reward
        completions: Sequence[Any],  # noqa: ARG002  as above
        *,
        completion_ids: Sequence[Sequence[int]] | None = None,
        environment_reward: Sequence[float | None] | None = None,
        **columns: Any,  # noqa: ARG002  as above
    ) -> list[float | None]:
        """Return the rewards of conversations.

        Raises:
            ValueError: If the run has no environment.
        """
        if environment_reward is None:
            raise ValueError("expected an environment for EnvironmentReward, got none: pass environment=")
        spoken = (
            [True] * len(environment_reward) if completion_ids is None else [len(ids) > 0 for ids in completion_ids]
        )
        default = [self.nothing if said else None for said in spoken]
        return [
            nothing if reward is None else reward for reward, nothing in zip(environment_reward, default, strict=True)
        ]
