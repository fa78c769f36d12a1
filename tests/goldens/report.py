"""Tables of verdicts: one row per algorithm, one line per failure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from goldens.verdict import Status, Verdict

COLUMNS = tuple(Status)


def table(verdicts: Sequence[Verdict]) -> str:
    """Counts per algorithm, a total, and a line for each failed case."""
    counts: dict[str, Counter[Status]] = defaultdict(Counter)
    for one in verdicts:
        counts[one.case.algorithm][one.status] += 1
    total = Counter(one.status for one in verdicts)
    width = max([len("algorithm"), *map(len, counts)])
    lines = [_row("algorithm", [str(column) for column in COLUMNS], width)]
    lines += [_row(name, [str(counts[name][column]) for column in COLUMNS], width) for name in sorted(counts)]
    lines += [_row("total", [str(total[column]) for column in COLUMNS], width)]
    return "\n".join([*lines, *_explanations(verdicts), *_failures(verdicts)])


def _row(name: str, cells: Iterable[str], width: int) -> str:
    counts = "  ".join(cell.rjust(len(column)) for cell, column in zip(cells, COLUMNS, strict=True))
    return f"{name.ljust(width)}  {counts}"


def _explanations(verdicts: Sequence[Verdict]) -> list[str]:
    rules = Counter(one.detail for one in verdicts if one.status is Status.RULE)
    absent = Counter((one.case.algorithm, one.detail) for one in verdicts if one.status is Status.NOT_OFFERED)
    lines = [f"on purpose   {number:4d}  {name}" for name, number in sorted(rules.items())]
    return lines + [f"not offered  {number:4d}  {name}: {why}" for (name, why), number in sorted(absent.items())]


def _failures(verdicts: Sequence[Verdict]) -> list[str]:
    return [f"FAILED  {one.case.id}  {one.detail}" for one in verdicts if one.status is Status.FAILED]
