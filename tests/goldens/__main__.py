"""``python -m tests.goldens FOLDER ...``: a table of every recorded call, by system and function.

A folder has the layout of ``tests/data/goldens``. The exit status is 1 if a call fails, and 2 without a folder.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as under pytest

import torch

from goldens.cases import Case, read_folder
from goldens.verdict import Status, Verdict, verdict

USAGE = "expected folders of recorded calls, got {}: python -m tests.goldens FOLDER [FOLDER ...]"
HEAD = ("system", "function", *Status)


def main(arguments: Sequence[str]) -> int:
    """Print the table of the folders and return the exit status."""
    cases = [case for one in arguments for case in read_folder(Path(one))]
    if not cases:
        print(USAGE.format(" ".join(arguments) or "none"))  # noqa: T201
        return 2
    torch.set_num_threads(1)
    verdicts = [verdict(case) for case in cases]
    print(table(verdicts))  # noqa: T201
    return int(any(one.status is Status.FAILED for one in verdicts))


def table(verdicts: Sequence[Verdict]) -> str:
    """Return counts for each function, the rules and parameters behind them, and a line for each failure."""
    counts = Counter((*_call(one.case), one.status) for one in verdicts)
    calls = sorted({_call(one.case) for one in verdicts})
    rows = [HEAD, *((*call, *(str(counts[*call, status]) for status in Status)) for call in calls)]
    total = Counter(one.status for one in verdicts)
    rows.append(("total", "", *(str(total[status]) for status in Status)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows] + list(_explanations(verdicts)))


def _call(case: Case) -> tuple[str, str]:
    return case.peer, case.function.rpartition("/")[2].split(" lines")[0]


def _explanations(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield what is behind the counts: rules, parameters that are not offered, and the largest difference."""
    for status in (Status.RULE, Status.NOT_OFFERED):
        found = Counter((*_call(one.case), one.detail) for one in verdicts if one.status is status)
        for (*call, detail), number in sorted(found.items()):
            yield f"{status}: {' '.join(call)}: {detail} ({number})"
    for one in verdicts:
        if one.status is Status.FAILED:
            yield f"{one.status}: {one.case.id}: {one.detail}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
