"""Results of conversations besides their tokens: rewards, metrics, and reports of failed environments."""

import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from lightning_rl.distributed import RunEndError
from lightning_rl.samples import Failure, Trajectory
from lightning_rl.utils.arguments import check_numbers
from lightning_rl.utils.terminal import visible, write_visible

DEFAULT = "environment"
"""Name of a single environment."""

REWARD_COLUMNS = ("conversation", "environment_reward")
"""Columns that reward functions receive: chat messages, and the environment's reward or None."""

FOLDER = "failed_environments"
MAX_CAUSES = 3  # of an error


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


class EnvironmentSummary(NamedTuple):
    """Failed conversations of a rollout on one rank: their causes with counts, and the path of the file with logs."""

    conversations: int
    causes: tuple[tuple[str, int], ...] = ()
    path: str = ""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], path: str = "") -> Self:
        """Count the causes."""
        causes = Counter(each.failure.cause for each in trajectories if each.failure is not None)
        return cls(len(trajectories), tuple(causes.most_common()), path)


def report_environments(trajectories: Sequence[Trajectory], path: Path | None, number: int | None = None) -> str:
    """Warn once of the failed conversations of a rollout on this rank, and write them with logs to a JSON Lines file.

    Args:
        trajectories: Conversations; others are left out.
        path: File; None to write none.
        number: Number of conversations; all of ``trajectories`` by default.

    Returns:
        The path of the file; empty if none was written.
    """
    failed = [(each, each.failure) for each in trajectories if each.failure is not None]
    if not failed:
        return ""
    records = [_record(*pair) for pair in failed]
    written = str(path) if path is not None and write_visible(path, records) else ""
    where = f"; all are in {written}" if written else f"\n{failed[0][1].traceback}"
    text = (
        f"{len(failed)} of {number or len(trajectories)} conversations failed with their environment, so they neither "
        f"train nor are rewarded. First, {failed[0][1].cause}{where}"
    )
    warnings.warn(visible(text).rstrip(), stacklevel=2)
    return written


def _record(trajectory: Trajectory, failure: Failure) -> dict[str, Any]:
    return {
        "environment": trajectory.environment,
        "failure": failure.cause,
        "log": failure.traceback,
        "messages": trajectory.messages,
        "answer": trajectory.answer,
        "metrics": trajectory.metrics,
        "seconds": trajectory.seconds,
    }


def check_environments(summaries: Sequence[EnvironmentSummary], number: int, max_share: float | None) -> None:
    """End the run on every rank if too many conversations of rollout ``number`` failed.

    Raises:
        FailedEnvironmentsError: If the share of failures reaches ``max_share``; names share, option and causes.
    """
    causes: Counter[str] = Counter()
    for summary in summaries:
        causes.update(dict(summary.causes))
    failed, conversations = causes.total(), sum(summary.conversations for summary in summaries)
    if max_share is None or not failed or failed < max_share * conversations:
        return
    paths = [summary.path for summary in summaries if summary.path]
    where = f" Their logs are in {paths[0]}." if paths else ""
    listed = "; ".join(f"{visible(cause)} ({count} times)" for cause, count in causes.most_common(MAX_CAUSES))
    raise FailedEnvironmentsError(
        f"expected working environments in rollout {number}, but {failed} of {conversations} conversations failed "
        f"(max_failure_rate={max_share:g}): {listed}. Fix the environment and resume, or allow more with "
        f"Conversations(max_failure_rate=).{where}"
    )
