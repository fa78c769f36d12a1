"""Finding: what a check of the doctor says: a fact, a warning or an error, and what to do about it."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["fact", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        severity: ``"fact"`` for what is only good to know.
        check: which check says so.
        what: what it found, and where.
        fix: what to change; empty for a fact.
    """

    severity: Severity
    check: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        """The finding, with its fix on a line of its own."""
        mark = "" if self.severity == "fact" else f"{self.severity.upper()}: "
        lines = [f"{self.check if number == 0 else '':<12}{line}" for number, line in enumerate(self._said(mark))]
        return "\n".join(lines)

    def _said(self, mark: str) -> list[str]:
        said = f"{mark}{self.what}".splitlines()
        return [*said, f"  fix: {self.fix}"] if self.fix else said


def fact(check: str, what: str) -> Finding:
    """Something good to know."""
    return Finding("fact", check, what)


def warning(check: str, what: str, fix: str) -> Finding:
    """Something that a run survives."""
    return Finding("warning", check, what, fix)


def error(check: str, what: str, fix: str) -> Finding:
    """Something that spoils a run or keeps it from beginning."""
    return Finding("error", check, what, fix)
