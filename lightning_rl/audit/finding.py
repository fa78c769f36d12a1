"""Finding: what a check saw that must not be, who caused it, and what to do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class AuditError(RuntimeError):
    """Raised by ``SignalAudit(mode="raise")``; the message holds every finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One violated invariant. A check says what is special about it; the register fills in what it leaves out.

    Attributes:
        check: name of the check.
        culprit: the callback with its method, the estimator, loss, reduction, engine or stage that caused it.
        expected: what the invariant demands.
        observed: what was there instead.
        cure: what to do.
        samples: identities of the rows concerned, at most a few.
        positions: response positions concerned, at most a few.
    """

    check: str = ""
    culprit: str = ""
    expected: str = ""
    observed: str = ""
    cure: str = ""
    samples: Sequence[int] = ()
    positions: Sequence[int] = ()

    def __str__(self) -> str:
        """One paragraph for a console."""
        place = f" (samples {list(self.samples)}, positions {list(self.positions)})" if self.samples else ""
        return (
            f"{self.check}: {self.culprit}: expected {self.expected}, observed {self.observed}{place}. "
            f"What to do: {self.cure}."
        )


def differences(
    ours: Tensor,
    theirs: Tensor,
    sample_ids: Tensor,
    *,
    culprit: str = "",
    expected: str = "",
    observed: str = "",
    rtol: float = 1e-4,
    atol: float = 1e-6,
) -> Iterator[Finding]:
    """One finding with a few samples and positions at which two tensors [B] or [B, T] differ; none if nowhere."""
    close = torch.isclose(ours.double(), theirs.double(), rtol=rtol, atol=atol, equal_nan=True)
    places = (~close).nonzero()[:8]
    if len(places):
        yield Finding(
            culprit=culprit,
            expected=expected,
            observed=observed,
            samples=[int(sample_ids[row]) for row in places[:, 0].unique()],
            positions=sorted({int(place[1]) for place in places}) if places.shape[-1] > 1 else (),
        )


def bitwise_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN at the same places."""
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or bool(torch.isclose(one.double(), other.double(), 0, 0, equal_nan=True).all())
