"""Failures: conversations whose environment could not go on are said once and kept in a file; too many end the run."""

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from lightning_rl.distributed import RunEndError
from lightning_rl.environments.outcome import Outcome
from lightning_rl.terminal import visible

FOLDER = "failed_environments"
SHOWN = 3  # causes


class FailedEnvironmentsError(RunEndError):
    """Environments failed in more of a rollout than the run puts up with, or were left because the run was to stop."""


class EnvironmentSummary(NamedTuple):
    """What one rank says of the conversations of a rollout.

    Attributes:
        conversations: how many there were.
        causes: why those that failed did, with how many times each.
        path: of the file with their logs; empty without one.
    """

    conversations: int
    causes: tuple[tuple[str, int], ...] = ()
    path: str = ""

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], path: str = "") -> Self:
        """Counts the causes."""
        causes = Counter(outcome.failure for outcome in outcomes if outcome.failure is not None)
        return cls(len(outcomes), tuple(causes.most_common()), path)


def report_environments(outcomes: Sequence[Outcome], path: Path | None) -> str:
    """Warns once of the conversations of a rollout that failed on this rank, and writes each with its log to a file.

    Args:
        outcomes: of all conversations.
        path: of the JSON Lines file; None for no file.

    Returns:
        The path of the file; empty if nothing failed or nothing could be written.
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
    """Ends the run, on every rank alike, if too many conversations of a rollout have failed.

    Args:
        summaries: of every rank.
        number: of the rollout.
        max_share: of failed conversations, from which on the run ends; None for never.

    Raises:
        FailedEnvironmentsError: naming the share, the option and the causes.
    """
    causes: Counter[str] = Counter()
    for summary in summaries:
        causes.update(dict(summary.causes))
    failed, conversations = causes.total(), sum(summary.conversations for summary in summaries)
    if max_share is None or not failed or failed < max_share * conversations:
        return
    paths = [summary.path for summary in summaries if summary.path]
    where = f" Their logs are in {paths[0]}." if paths else ""
    told = "; ".join(f"{visible(cause)} ({count} times)" for cause, count in causes.most_common(SHOWN))
    raise FailedEnvironmentsError(
        f"expected environments that go on for rollout {number}, but {failed} of {conversations} conversations failed "
        f"(max_failed_environments={max_share:g}): {told}. Mend the environment and resume, or allow more with "
        f"max_failed_environments=.{where}"
    )


def _write(failed: Sequence[Outcome], path: Path) -> bool:
    """Whether the file could be written: a full disk is no reason to end a run."""
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
