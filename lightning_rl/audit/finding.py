"""What a finding needs: the error that carries it, and the places where two tensors differ."""

import torch
from torch import Tensor

from lightning_rl.finding import Finding

__all__ = ["AuditError", "Finding", "differing"]


class AuditError(RuntimeError):
    """Raised by ``SignalAudit(mode="raise")``; the message holds every finding."""


def differing(
    ours: Tensor, theirs: Tensor, sample_ids: Tensor, *, rtol: float = 1e-4, atol: float = 1e-6
) -> tuple[list[int], list[int]]:
    """Samples and positions at which two tensors [B] or [B, T] differ, a few of each; both empty if nowhere."""
    close = torch.isclose(ours.double(), theirs.double(), rtol=rtol, atol=atol, equal_nan=True)
    places = (~close).nonzero()[:8]
    samples = [int(sample_ids[row]) for row in places[:, 0].unique()] if len(places) else []
    positions = sorted({int(place[1]) for place in places}) if places.shape[-1] > 1 else []
    return samples, positions
