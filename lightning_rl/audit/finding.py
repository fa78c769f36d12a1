"""Finding: what a check saw that must not be, who caused it, and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class AuditError(RuntimeError):
    """Raised by ``SignalAudit(mode="raise")``; the message holds every finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One violated invariant.

    Attributes:
        check: name of the check.
        culprit: the callback with its method, the estimator, loss, reduction, engine or stage that caused it.
        expected: what the invariant demands.
        observed: what was there instead.
        cure: what to do.
        samples: identities of the rows concerned, at most a few.
        positions: response positions concerned, at most a few.
    """

    check: str
    culprit: str
    expected: str
    observed: str
    cure: str
    samples: Sequence[int] = ()
    positions: Sequence[int] = ()

    def __str__(self) -> str:
        """One paragraph for a console."""
        place = f" (samples {list(self.samples)}, positions {list(self.positions)})" if self.samples else ""
        return (
            f"{self.check}: {self.culprit}: expected {self.expected}, observed {self.observed}{place}. "
            f"What to do: {self.cure}."
        )


def differing(
    ours: Tensor, theirs: Tensor, sample_ids: Tensor, *, rtol: float = 1e-4, atol: float = 1e-6
) -> tuple[list[int], list[int]]:
    """Samples and positions at which two tensors [B] or [B, T] differ, a few of each; both empty if nowhere."""
    close = torch.isclose(ours.double(), theirs.double(), rtol=rtol, atol=atol, equal_nan=True)
    places = (~close).nonzero()[:8]
    samples = [int(sample_ids[row]) for row in places[:, 0].unique()] if len(places) else []
    positions = sorted({int(place[1]) for place in places}) if places.shape[-1] > 1 else []
    return samples, positions
