"""Finding: what a check saw that must not be, or that is good to know, who caused it, and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["fact", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One violated invariant, or one fact about a run; what a check leaves out, whoever runs the checks fills in.

    Attributes:
        check: name of the check.
        culprit: the callback with its method, the estimator, loss, reduction, engine or stage that caused it; empty if
            the check says it.
        expected: what the invariant demands; empty if what was observed says it.
        observed: what was there.
        cure: what to do; empty for a fact.
        samples: identities of the rows concerned, at most a few.
        positions: response positions concerned, at most a few.
        severity: ``"error"`` spoils a run, it survives a ``"warning"``, and a ``"fact"`` is only good to know.
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
        """One paragraph for a console."""
        place = f" (samples {list(self.samples)}, positions {list(self.positions)})" if self.samples else ""
        return (
            f"{self.check}: {self.culprit}: expected {self.expected}, observed {self.observed}{place}. "
            f"What to do: {self.cure}."
        )
