"""Failures: what rewards failed on in a rollout, said once and written to a file; too much of it ends the run."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rl.distributed import RunEndError
from lightning_rl.rewards.call import RewardCall
from lightning_rl.rewards.limit import CLOCK
from lightning_rl.terminal import dump_visible, visible

FOLDER = "failed_rewards"


class RewardError(RunEndError):
    """Rewards failed on more of a rollout than the run puts up with."""


class RewardSummary(NamedTuple):
    """What one rank says of the rewards of a rollout.

    Attributes:
        rows: how many were scored.
        failed: how many of them have no reward because a function failed.
        cause: the first failure, with its traceback; empty without one.
        path: of the file with the samples; empty without one.
        stopped_by: the signal because of which a call was cut short, or 0.
        metrics: names of what the functions noted.
    """

    rows: int
    failed: int
    cause: str = ""
    path: str = ""
    stopped_by: int = 0
    metrics: tuple[str, ...] = ()


def report_failures(calls: Sequence[RewardCall], path: Path | None) -> str:
    """Warns once of all failures of some calls, with the first sample, and writes every sample to a file.

    Args:
        calls: of one rollout on this rank.
        path: of the JSON Lines file; None for no file.

    Returns:
        The first failure with its traceback; empty if there is none.
    """
    failing = [call for call in calls if call.failures]
    if not failing:
        return ""
    call, failure = failing[0], failing[0].failures[0]
    row = failure.rows[0]
    rows = {call.name: sum(len(failure.rows) for failure in call.failures) for call in failing}
    where = f"; every such sample is in {path}" if path is not None and _write(failing, path) else ""
    cause = visible(f"reward {call.name} {failure.cause}")
    text = "; ".join(f"{name} failed on {number}" for name, number in rows.items())
    traceback = visible(failure.traceback)  # an exception may quote what a model wrote
    warnings.warn(
        f"rows get no reward and enter no reward statistic: {text}. First, {cause} for completion "
        f"{call.completions[row]!r:.1000} of prompt {call.prompts[row]!r:.1000}{where}\n{traceback}".rstrip(),
        stacklevel=2,
    )
    return f"{cause}\n{traceback}".rstrip()


def check_failures(summaries: Sequence[RewardSummary], number: int, max_share: float | None) -> None:
    """Ends the run, on every rank alike, if too many rows of a rollout have failed.

    Args:
        summaries: of every rank.
        number: of the rollout.
        max_share: of failed rows, from which on the run ends; None for never.

    Raises:
        RewardError: naming the share, the option and the first cause.
    """
    rows, failed = sum(summary.rows for summary in summaries), sum(summary.failed for summary in summaries)
    first = next((summary for summary in summaries if summary.cause), RewardSummary(0, 0))
    if any(summary.stopped_by for summary in summaries):
        raise RewardError(f"rollout {number} was left unfinished and begins anew on resume: {first.cause}")
    if max_share is None or not failed or failed < max_share * rows:
        return
    where = f" The samples are in {first.path}." if first.path else ""
    raise RewardError(
        f"expected rewards for rollout {number}, but they failed on {failed} of {rows} rows (max_failed_rewards="
        f"{max_share:g}): mend the reward and resume, allow more with max_failed_rewards=, or call it for "
        f"each row alone by Isolated(reward, per_sample=True).{where}\n{first.cause}"
    )


def was_cut_short(calls: Sequence[RewardCall]) -> int:
    """The signal because of which a call failed, or 0."""
    ended = any(failure.cause.startswith(CLOCK.reason()) for call in calls for failure in call.failures)
    return CLOCK.stopped_by if ended else 0


def _write(calls: Sequence[RewardCall], path: Path) -> bool:
    """Whether the file could be written: a full disk is no reason to end a run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for call in calls:
                for sample in _samples(call):
                    file.write(dump_visible(sample, default=repr) + "\n")
    except (OSError, ValueError, TypeError):
        return False
    return True


def _samples(call: RewardCall) -> list[Mapping[str, Any]]:
    """A row of the file for each failed row; the traceback stands at the first of each cause."""
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
