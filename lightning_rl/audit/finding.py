"""What a finding needs: the error that carries it, and the places where two tensors differ."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rl.finding import Finding

NO_ROWS = "no row that was looked at trains"


class AuditError(RuntimeError):
    """Raised by ``SignalAudit(mode="raise")``; the message holds every finding."""


@dataclass(frozen=True, slots=True)
class Skip:
    """What a check yields in the place of a finding where it could not look: it has neither passed nor failed.

    Attributes:
        why: as one clause, such as ``"the engine returns no log-probabilities"``.
    """

    why: str


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


def gradient_of(per_token: Tensor, leaf: Tensor) -> Tensor:
    """The gradient of a sum with respect to a leaf; 0 where it has none."""
    if not per_token.requires_grad:
        return torch.zeros_like(leaf)
    return torch.autograd.grad(per_token.sum(), leaf, allow_unused=True, materialize_grads=True)[0]


def bitwise_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN at the same places."""
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or bool(torch.isclose(one.double(), other.double(), 0, 0, equal_nan=True).all())
