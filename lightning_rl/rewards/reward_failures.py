"""Report of failed rewards: one warning and a file per rollout, and an error if too many rows fail."""

import warnings
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rl.processes.errors import INTERRUPT
from lightning_rl.rewards.scoring import RewardError
from lightning_rl.samples import Failure, RewardCall
from lightning_rl.utils.terminal import visible, write_visible

FOLDER = "failed_rewards"


class RewardSummary(NamedTuple):
    """Reward statistics of a rollout on one rank.

    Attributes:
        rows: Number of rows.
        failed: Number of rows without a reward because a function failed.
        cause: First failure with its traceback, or an empty string.
        path: File with the failed samples, or an empty string.
        interrupted: True if a signal that stopped the run interrupted a call.
        metrics: Names of the metrics that the functions logged.
    """

    rows: int
    failed: int
    cause: str = ""
    path: str = ""
    interrupted: bool = False
    metrics: tuple[str, ...] = ()


def report_failures(calls: Sequence[RewardCall], path: Path | None) -> str:
    """Warn once of all failures with the first sample, and write every failed sample to a file.

    Args:
        calls: Calls of one rollout on this rank.
        path: Path of the JSON Lines file; None for no file.

    Returns:
        First failure with its traceback, or an empty string.
    """
    failing = [call for call in calls if call.failures]
    if not failing:
        return ""
    call, failure = failing[0], failing[0].failures[0]
    row = failure.rows[0]
    rows = {call.name: sum(len(failure.rows) for failure in call.failures) for call in failing}
    where = (
        f"; all failed samples are in {path}"
        if path is not None and write_visible(path, chain(*map(_samples, failing)))
        else ""
    )
    cause = visible(f"reward {call.name} {failure.cause}{_chat_hint(call, failure)}")
    text = "; ".join(f"{name} failed on {number}" for name, number in rows.items())
    traceback = visible(failure.traceback)  # an exception may quote model output
    warnings.warn(
        f"rows get no reward and are left out of reward statistics: {text}. First, {cause} for completion "
        f"{call.completions[row]!r:.1000} of prompt {call.prompts[row]!r:.1000}{where}\n{traceback}".rstrip(),
        stacklevel=2,
    )
    return f"{cause}\n{traceback}".rstrip()


def _chat_hint(call: RewardCall, failure: Failure) -> str:
    """Return how to read a completion if the reward raised an error of a type and got chat messages."""
    if isinstance(call.completions[failure.rows[0]], str) or failure.kind not in ("TypeError", "AttributeError"):
        return ""
    return (
        " (completions of chat prompts are lists of messages, as in TRL: read texts with [text_of(one) for one in "
        "completions], from lightning_rl.rewards import text_of)"
    )


def check_failures(summaries: Sequence[RewardSummary], number: int, max_share: float | None) -> None:
    """Raise on every rank if too many rows of a rollout have failed.

    Args:
        summaries: Summaries of all ranks.
        number: Number of the rollout.
        max_share: Share of failed rows that ends the run; None for no limit.

    Raises:
        RewardError: If the share is reached, or a signal interrupted a call.
    """
    rows, failed = sum(summary.rows for summary in summaries), sum(summary.failed for summary in summaries)
    first = next((summary for summary in summaries if summary.cause), RewardSummary(0, 0))
    if any(summary.interrupted for summary in summaries):
        raise RewardError(f"rollout {number} was interrupted and is repeated on resume: {first.cause}")
    if max_share is None or not failed or failed < max_share * rows:
        return
    where = f" The samples are in {first.path}." if first.path else ""
    raise RewardError(
        f"expected rewards for rollout {number}, but they failed on {failed} of {rows} rows (max_failure_rate="
        f"{max_share:g}): fix the reward and resume, allow more with Rewards(max_failure_rate=), or score "
        f"each row separately with SubprocessReward(reward, per_sample=True).{where}\n{first.cause}"
    )


def was_cut_short(calls: Sequence[RewardCall]) -> bool:
    """Return True if a signal that stopped the run interrupted a call."""
    return any(failure.kind == INTERRUPT for call in calls for failure in call.failures)


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
