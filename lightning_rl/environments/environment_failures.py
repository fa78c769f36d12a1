"""Reports of failed environments: one warning, a file with logs, and an error if there are too many."""

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from lightning_rl.distributed import RunEndError
from lightning_rl.environments.outcome import Outcome
from lightning_rl.utils.terminal import visible

FOLDER = "failed_environments"
SHOWN = 3  # number of causes in an error


class FailedEnvironmentsError(RunEndError):
    """Too many failed environments in a rollout, or an environment that was interrupted because the run has to stop."""


class EnvironmentSummary(NamedTuple):
    """Failed conversations of a rollout on one rank.

    Attributes:
        conversations: Number of conversations.
        causes: Causes of failures with their counts.
        path: Path of the file with their logs; empty without one.
    """

    conversations: int
    causes: tuple[tuple[str, int], ...] = ()
    path: str = ""

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], path: str = "") -> Self:
        """Count the causes."""
        causes = Counter(outcome.failure for outcome in outcomes if outcome.failure is not None)
        return cls(len(outcomes), tuple(causes.most_common()), path)


def report_environments(outcomes: Sequence[Outcome], path: Path | None) -> str:
    """Warn once of the failed conversations of a rollout on this rank, and write each with its log to a file.

    Args:
        outcomes: Outcomes of all conversations.
        path: Path of the JSON Lines file, or None.

    Returns:
        The path of the file; empty if none was written.
    """
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    if not failed:
        return ""
    written = str(path) if path is not None and _write(failed, path) else ""
    where = f"; all are in {written}" if written else f"\n{failed[0].log}"
    text = (
        f"{len(failed)} of {len(outcomes)} conversations failed with their environment, so they neither train nor are "
        f"rewarded. First, {failed[0].failure}{where}"
    )
    warnings.warn(visible(text).rstrip(), stacklevel=2)
    return written


def check_environments(summaries: Sequence[EnvironmentSummary], number: int, max_share: float | None) -> None:
    """End the run on every rank if too many conversations of a rollout failed.

    Args:
        summaries: Summaries of every rank.
        number: Number of the rollout.
        max_share: Share of failed conversations at which the run ends; None for never.

    Raises:
        FailedEnvironmentsError: If it is reached; names share, option and causes.
    """
    causes: Counter[str] = Counter()
    for summary in summaries:
        causes.update(dict(summary.causes))
    failed, conversations = causes.total(), sum(summary.conversations for summary in summaries)
    if max_share is None or not failed or failed < max_share * conversations:
        return
    paths = [summary.path for summary in summaries if summary.path]
    where = f" Their logs are in {paths[0]}." if paths else ""
    listed = "; ".join(f"{visible(cause)} ({count} times)" for cause, count in causes.most_common(SHOWN))
    raise FailedEnvironmentsError(
        f"expected working environments in rollout {number}, but {failed} of {conversations} conversations failed "
        f"(max_environment_failure_rate={max_share:g}): {listed}. Fix the environment and resume, or allow more with "
        f"max_environment_failure_rate=.{where}"
    )


def _write(failed: Sequence[Outcome], path: Path) -> bool:
    """Write the file; return False if that fails, as a full disk should not end a run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for outcome in failed:
                keys = ("environment", "failure", "log", "messages", "answer", "metrics", "seconds")
                row = {key: getattr(outcome, key) for key in keys}
                file.write(json.dumps(row, default=repr) + "\n")
    except (OSError, ValueError, TypeError):
        return False
    return True
