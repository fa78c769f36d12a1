"""FailureReport: failed rewards and environments of a rollout or an evaluation."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxtyping import Bool
from torch import Tensor

from lightning_rl.environments.outcome import FailedEnvironmentsError
from lightning_rl.processes.errors import INTERRUPT
from lightning_rl.rewards import RewardCall, RewardError, Rewards
from lightning_rl.samples import Failure, Trajectory
from lightning_rl.utils.terminal import visible, write_visible

FOLDER, ENVIRONMENTS = "failed_rewards", "failed_environments"
MAX_CAUSES = 3  # of an error


class FailureSummary(NamedTuple):
    """Failures of a rollout on one rank.

    Attributes:
        rows: Number of rows whose conversation, if any, did not fail.
        failed: Number of rows without a reward because a function failed.
        cause: First failure of a reward with its traceback, or an empty string.
        path: File with the rows that rewards failed on, or an empty string.
        interrupted: True if a signal that stopped the run interrupted a call.
        conversations: Number of conversations.
        broken: Number of conversations that failed with their environment, by cause.
        broken_path: File with their logs, or an empty string.
    """

    rows: int
    failed: int
    cause: str = ""
    path: str = ""
    interrupted: bool = False
    conversations: int = 0
    broken: Mapping[str, int] = MappingProxyType({})
    broken_path: str = ""


class FailureReport:
    """Failures of rewards and environments in a rollout or an evaluation on this rank.

    Args:
        rewards: Reward functions; None without rewards.
    """

    def __init__(self, rewards: Rewards | None = None) -> None:
        self._counts = {} if rewards is None else dict.fromkeys(rewards.by_name, 0)
        self._rows = self._failed = self._conversations = 0
        self._failing: list[RewardCall] = []
        self._broken: list[tuple[Trajectory, Failure]] = []

    def add(
        self, samples: Sequence[Trajectory], calls: Sequence[RewardCall] = (), failed: Bool[Tensor, " B"] | None = None
    ) -> None:
        """Add some samples, the calls of rewards on them, and a mask of those that rewards failed on."""
        if failed is not None:
            broken = sum(each.failure is not None and not each.baseline for each in samples)  # without rewards anyway
            self._rows, self._failed = self._rows + len(failed) - broken, self._failed + int(failed.sum())
        for call in calls:
            self._counts[call.name] += sum(len(failure.rows) for failure in call.failures)
        self._failing += [call for call in calls if call.failures]
        self._conversations += len(samples)
        self._broken += [(each, each.failure) for each in samples if each.failure is not None]

    @property
    def failed_conversations(self) -> int:
        """Number of conversations that failed with their environment."""
        return len(self._broken)

    def stats(self) -> dict[str, int]:
        """Return the numbers of rows without a reward because a function failed, and of those by function."""
        return {
            "reward/failed": self._failed,
            **{f"reward_failed/{name}": number for name, number in self._counts.items()},
        }

    def write(self, folder: Path | None = None, name: str = "") -> FailureSummary:
        """Warn once of all failed rewards and once of all failed conversations, with the first; write each to a file.

        Args:
            folder: Folder for samples with failed rewards, next to that of failed environments; None to write none.
            name: Name of the files, in JSON Lines.
        """
        path = None if folder is None else folder / name
        cause = self._write_rewards(path)
        return FailureSummary(
            rows=self._rows,
            failed=self._failed,
            cause=cause,
            path=str(path) if cause and path is not None else "",
            interrupted=any(failure.kind == INTERRUPT for call in self._failing for failure in call.failures),
            conversations=self._conversations,
            broken=Counter(failure.cause for _, failure in self._broken),
            broken_path=self._write_conversations(None if folder is None else folder.with_name(ENVIRONMENTS) / name),
        )

    def _write_conversations(self, path: Path | None) -> str:
        """Return the path of the file with failed conversations, or an empty string."""
        if not self._broken:
            return ""
        written = (
            str(path) if path is not None and write_visible(path, [_record(*pair) for pair in self._broken]) else ""
        )
        first = self._broken[0][1]
        where = f"; all are in {written}" if written else f"\n{first.traceback}"
        text = (
            f"{len(self._broken)} of {self._conversations} conversations failed with their environment, so they "
            f"neither train nor are rewarded. First, {first.cause}{where}"
        )
        warnings.warn(visible(text).rstrip(), stacklevel=2)
        return written

    def _write_rewards(self, path: Path | None) -> str:
        """Return the first failure of a reward with its traceback, or an empty string."""
        if not self._failing:
            return ""
        call, failure = self._failing[0], self._failing[0].failures[0]
        row = failure.rows[0]
        where = (
            f"; all failed samples are in {path}"
            if path is not None and write_visible(path, chain(*map(_samples, self._failing)))
            else ""
        )
        cause = visible(f"reward {call.name} {failure.cause}{_chat_hint(call, failure)}")
        text = "; ".join(f"{name} failed on {number}" for name, number in self._counts.items() if number)
        traceback = visible(failure.traceback)  # an exception may quote model output
        warnings.warn(
            f"rows get no reward and are left out of reward statistics: {text}. First, {cause} for completion "
            f"{call.completions[row]!r:.1000} of prompt {call.prompts[row]!r:.1000}{where}\n{traceback}".rstrip(),
            stacklevel=2,
        )
        return f"{cause}\n{traceback}".rstrip()


def check_failures(
    summaries: Sequence[FailureSummary], number: int, rewards: float | None, conversations: float | None = None
) -> None:
    """Raise on every rank if too many rows or conversations of a rollout have failed.

    Args:
        summaries: Summaries of all ranks.
        number: Number of the rollout.
        rewards: Share of rows with failed rewards that ends the run; None for no limit.
        conversations: Share of failed conversations that ends the run; None for no limit.

    Raises:
        RewardError: If the share of rows is reached, or a signal interrupted a call.
        FailedEnvironmentsError: If the share of conversations is reached.
    """
    rows, failed = sum(summary.rows for summary in summaries), sum(summary.failed for summary in summaries)
    first = next((summary for summary in summaries if summary.cause), FailureSummary(0, 0))
    if any(summary.interrupted for summary in summaries):
        raise RewardError(f"rollout {number} was interrupted and is repeated on resume: {first.cause}")
    if rewards is not None and failed and failed >= rewards * rows:
        where = f" The samples are in {first.path}." if first.path else ""
        raise RewardError(
            f"expected rewards for rollout {number}, but they failed on {failed} of {rows} rows (max_failure_rate="
            f"{rewards:g}): fix the reward and resume, allow more with Rewards(max_failure_rate=), or score "
            f"each row separately with SubprocessReward(reward, per_sample=True).{where}\n{first.cause}"
        )
    causes = sum((Counter(summary.broken) for summary in summaries), Counter[str]())
    broken, drawn = causes.total(), sum(summary.conversations for summary in summaries)
    if conversations is None or not broken or broken < conversations * drawn:
        return
    paths = [summary.broken_path for summary in summaries if summary.broken_path]
    where = f" Their logs are in {paths[0]}." if paths else ""
    listed = "; ".join(f"{visible(cause)} ({count} times)" for cause, count in causes.most_common(MAX_CAUSES))
    raise FailedEnvironmentsError(
        f"expected working environments in rollout {number}, but {broken} of {drawn} conversations failed "
        f"(max_failure_rate={conversations:g}): {listed}. Fix the environment and resume, or allow more with "
        f"Conversations(max_failure_rate=).{where}"
    )


def _record(sample: Trajectory, failure: Failure) -> dict[str, Any]:
    return {
        "environment": sample.environment,
        "failure": failure.cause,
        "log": failure.traceback,
        "messages": sample.messages,
        "answer": sample.answer,
        "metrics": sample.metrics,
        "seconds": sample.seconds,
    }


def _chat_hint(call: RewardCall, failure: Failure) -> str:
    """Return how to read a completion if the reward raised an error of a type and got chat messages."""
    if isinstance(call.completions[failure.rows[0]], str) or failure.kind not in ("TypeError", "AttributeError"):
        return ""
    return (
        " (completions of chat prompts are lists of messages, as in TRL: read texts with [text_of(one) for one in "
        "completions], from lightning_rl.rewards import text_of)"
    )


def _samples(call: RewardCall) -> list[Mapping[str, Any]]:
    """Return one record per failed row; the traceback is in the first record of each cause."""
    return [
        {
            "reward": call.name,
            "row": row,
            "cause": failure.cause,
            "traceback": failure.traceback if row == failure.rows[0] else "",
            "prompt": call.prompts[row],
            "completion": call.completions[row],
            "completion_ids": list(call.completion_ids[row]),
            "columns": {name: values[row] for name, values in call.columns.items()},
            "extras": {name: values[row] for name, values in call.extras.items()},
        }
        for failure in call.failures
        for row in failure.rows
    ]
