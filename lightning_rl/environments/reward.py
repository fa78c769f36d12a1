"""EnvironmentReward: what the environment gave a conversation, as a reward like any other."""

from collections.abc import Sequence
from typing import Any

from lightning_rl.arguments import check_numbers


class EnvironmentReward:
    """The sum of the rewards of a conversation's turns.

    Args:
        nothing: of a conversation whose environment gave no reward, such as one that a limit ended; None for no reward,
            so that it enters no statistic. One in which the policy said nothing, for want of room, never has any.

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
        """The rewards of some conversations.

        Raises:
            ValueError: if the run has no environment.
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
