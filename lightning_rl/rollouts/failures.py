"""FailureReport: failed rewards and environments of a rollout or an evaluation."""

import warnings
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from jaxtyping import Bool
from torch import Tensor

from lightning_rl.environments import outcome as environments
from lightning_rl.environments.outcome import EnvironmentSummary, Outcome
from lightning_rl.processes.errors import INTERRUPT
from lightning_rl.rewards import RewardCall, RewardError, Rewards
from lightning_rl.samples import Failure
from lightning_rl.utils.terminal import visible, write_visible

FOLDER = "failed_rewards"


class FailureSummary(NamedTuple):
    """Failures of a rollout on one rank.

    Attributes:
        rows: Number of rows.
        failed: Number of rows without a reward because a function failed.
        cause: First failure of a reward with its traceback, or an empty string.
        path: File with the rows that rewards failed on, or an empty string.
        interrupted: True if a signal that stopped the run interrupted a call.
        environments: Failed conversations.
    """

    rows: int
    failed: int
    cause: str = ""
    path: str = ""
    interrupted: bool = False
    environments: EnvironmentSummary = EnvironmentSummary(0)


class FailureReport:
    """Failures of rewards and environments in a rollout or an evaluation on this rank.

    Args:
        rewards: Reward functions.
    """

    def __init__(self, rewards: Rewards) -> None:
        self._counts = dict.fromkeys(rewards.by_name, 0)
        self._rows = self._failed = 0
        self._failing: list[RewardCall] = []
        self._outcomes: list[Outcome] = []

    def add(self, calls: Sequence[RewardCall], failed: Bool[Tensor, " B"], outcomes: Sequence[Outcome] = ()) -> None:
        """Add some samples: the calls of rewards, a mask of the rows that they failed on, and conversations."""
        self._rows, self._failed = self._rows + len(failed), self._failed + int(failed.sum())
        for call in calls:
            self._counts[call.name] += sum(len(failure.rows) for failure in call.failures)
        self._failing += [call for call in calls if call.failures]
        self._outcomes += outcomes

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
        beside = None if folder is None else folder.with_name(environments.FOLDER) / name
        written = environments.report_environments(self._outcomes, beside)
        return FailureSummary(
            rows=self._rows,
            failed=self._failed,
            cause=cause,
            path=str(path) if cause and path is not None else "",
            interrupted=any(failure.kind == INTERRUPT for call in self._failing for failure in call.failures),
            environments=EnvironmentSummary.of(self._outcomes, written),
        )

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
    environments.check_environments([summary.environments for summary in summaries], number, conversations)


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
