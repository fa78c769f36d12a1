"""Results of conversations besides their tokens: rewards and metrics."""

from collections.abc import Sequence
from typing import Any

from lightning_rl.distributed import RunEndError
from lightning_rl.samples import Trajectory
from lightning_rl.utils.arguments import check_numbers

DEFAULT = "environment"
"""Name of a single environment."""

REWARD_COLUMNS = ("conversation", "environment_reward")
"""Columns that reward functions receive: chat messages, and the environment's reward or None."""


def reward_columns(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """Return the columns that rewards receive besides those of the data; none without an environment."""
    if not any(each.environment for each in trajectories):
        return {}
    messages = [[dict(message) for message in each.messages] for each in trajectories]
    return dict(zip(REWARD_COLUMNS, (messages, [each.environment_reward for each in trajectories]), strict=True))


def metrics_of(trajectories: Sequence[Trajectory]) -> dict[str, list[float]]:
    """Return the metrics of conversations by logged name, one value per conversation.

    A metric that is missing in a conversation counts as 0. With several environments the names are
    ``env/<environment>/<metric>``.
    """
    names = {each.environment for each in trajectories} - {""}
    logged: dict[str, list[float]] = {}
    for name in sorted(names):
        mine = [each for each in trajectories if each.environment == name]
        prefix = "env" if names == {DEFAULT} else f"env/{name}"
        for metric in sorted({metric for each in mine for metric in each.metrics}):
            logged[f"{prefix}/{metric}"] = [float(each.metrics.get(metric, 0.0)) for each in mine]
        rewards = [each.environment_reward for each in mine if each.environment_reward is not None]
        logged |= {f"{prefix}/reward": rewards} if rewards else {}
    return {**logged, "time/environment": [each.seconds for each in trajectories]}


class EnvironmentReward:
    """Sum of the rewards of a conversation's turns.

    Args:
        nothing: Reward of a conversation whose environment gave none, because a limit or the environment ended it
            first; None for no reward, so that it enters no statistic. A conversation without any answer never has one.

    Example:
        >>> EnvironmentReward()(["?", "?"], ["4", "5"], environment_reward=[1.0, None])
        [1.0, 0.0]
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
        answered = [True] * len(environment_reward) if completion_ids is None else map(len, completion_ids)
        return [
            self.nothing if reward is None and length else reward
            for reward, length in zip(environment_reward, answered, strict=True)
        ]


class FailedEnvironmentsError(RunEndError):
    """Too many failed environments in a rollout, or an environment that was interrupted because the run has to stop."""
