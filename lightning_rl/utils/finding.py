"""Finding: result of a check."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["fact", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A violated invariant, or a fact about a run; the runner of the checks fills in empty fields.

    Attributes:
        check: Name of the check.
        culprit: Callback with method, estimator, loss, reduction, engine or stage that caused it; empty for the check's
            default.
        expected: Invariant; empty if ``observed`` implies it.
        observed: Observation.
        cure: Recommended action; empty for a fact.
        samples: Ids of affected rows, at most a few.
        positions: Affected response positions, at most a few.
        severity: ``"error"`` invalidates a run, ``"warning"`` does not, ``"fact"`` is information.
    """

    check: str = ""
    culprit: str = ""
    expected: str = ""
    observed: str = ""
    cure: str = ""
    samples: Sequence[int] = ()
    positions: Sequence[int] = ()
    severity: Severity = "error"

    def __str__(self) -> str:
        """Return one paragraph for a console."""
        place = f" (samples {list(self.samples)}, positions {list(self.positions)})" if self.samples else ""
        return (
            f"{self.check}: {self.culprit}: expected {self.expected}, observed {self.observed}{place}. "
            f"What to do: {self.cure}."
        )
