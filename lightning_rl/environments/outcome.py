"""Results of conversations besides their tokens: rewards, metrics, and reports of failed environments."""

import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

from lightning_rl.distributed import RunEndError
from lightning_rl.samples import Message
from lightning_rl.utils.arguments import check_numbers
from lightning_rl.utils.terminal import visible, write_visible

REWRITTEN = "rewritten"
"""Key that marks the messages of a rewritten context in a conversation's record."""

DEFAULT = "environment"
"""Name of a single environment."""

REWARD_COLUMNS = ("conversation", "environment_reward")
"""Columns that reward functions receive: chat messages, and the environment's reward or None."""

FOLDER = "failed_environments"
MAX_CAUSES = 3  # of an error
LOGGED = ("environment", "failure", "log", "messages", "answer", "metrics", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Results of a conversation.

    Args:
        answer: Token ids of the last turn.
        environment: Name of the environment; empty without one.
        messages: Messages of the conversation, if the environment uses them.
        reward: Sum of the environment's rewards, or None.
        metrics: Metrics, summed over turns.
        seconds: Seconds spent in the environment.
        failure: Description of the failure, of the second try if there was one; None without one.
        log: Traceback of the failure.
        opening: Number of messages before the first answer.
    """

    answer: tuple[int, ...]
    environment: str = ""
    messages: tuple[Message, ...] = ()
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str | None = None
    log: str = ""
    opening: int = 0

    def completion(self, text: str) -> str | list[dict[str, Any]]:
        """Return the messages from the first answer of the policy to its last one, whose content is ``text``.

        Rewritten contexts are left out. Returns the text if the environment uses no messages.
        """
        after = [dict(message) for message in self.messages[self.opening :] if not message.get(REWRITTEN)]
        answers = [place for place, message in enumerate(after) if message.get("role") == "assistant"]
        if not answers:
            return text
        said = after[answers[0] : answers[-1] + 1]
        return [*said[:-1], {**said[-1], "content": text}]

    def state(self) -> dict[str, Any]:
        """Return plain values that load under ``weights_only=True``; messages as JSON."""
        messages = json.dumps([dict(message) for message in self.messages], default=str)
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**plain, "answer": list(self.answer), "messages": messages, "metrics": dict(self.metrics)}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "Outcome":
        """Invert :meth:`state`."""
        answer, messages = tuple(state["answer"]), tuple(json.loads(state["messages"]))
        return Outcome(**dict[str, Any](state, answer=answer, messages=messages))


def reward_columns(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Return the columns that rewards receive besides those of the data."""
    if not outcomes:
        return {}
    messages = [[dict(message) for message in outcome.messages] for outcome in outcomes]
    return dict(zip(REWARD_COLUMNS, (messages, [outcome.reward for outcome in outcomes]), strict=True))


def metrics_of(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Return the metrics of conversations by logged name, one value per conversation.

    A metric that is missing in a conversation counts as 0. With several environments the names are
    ``env/<environment>/<metric>``.
    """
    names = {outcome.environment for outcome in outcomes} - {""}
    logged: dict[str, list[float]] = {}
    for name in sorted(names):
        mine = [outcome for outcome in outcomes if outcome.environment == name]
        prefix = "env" if names == {DEFAULT} else f"env/{name}"
        for metric in sorted({metric for outcome in mine for metric in outcome.metrics}):
            logged[f"{prefix}/{metric}"] = [float(outcome.metrics.get(metric, 0.0)) for outcome in mine]
        rewards = [outcome.reward for outcome in mine if outcome.reward is not None]
        logged |= {f"{prefix}/reward": rewards} if rewards else {}
    return {**logged, "time/environment": [outcome.seconds for outcome in outcomes]}


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
    def of(cls, outcomes: Sequence[Outcome], path: str = "") -> Self:
        """Count the causes."""
        causes = Counter(outcome.failure for outcome in outcomes if outcome.failure is not None)
        return cls(len(outcomes), tuple(causes.most_common()), path)


def report_environments(outcomes: Sequence[Outcome], path: Path | None) -> str:
    """Warn once of the failed conversations of a rollout on this rank, and write them with logs to a JSON Lines file.

    Returns:
        The path of the file; empty if none was written.
    """
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    if not failed:
        return ""
    records = [{key: getattr(outcome, key) for key in LOGGED} for outcome in failed]
    written = str(path) if path is not None and write_visible(path, records) else ""
    where = f"; all are in {written}" if written else f"\n{failed[0].log}"
    text = (
        f"{len(failed)} of {len(outcomes)} conversations failed with their environment, so they neither train nor are "
        f"rewarded. First, {failed[0].failure}{where}"
    )
    warnings.warn(visible(text).rstrip(), stacklevel=2)
    return written


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
