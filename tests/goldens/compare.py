"""Differences between our values and recorded ones."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from goldens.cases import Field


class Difference(NamedTuple):
    """One output field: ours, theirs, and the positions that are too far apart."""

    ours: np.ndarray
    theirs: np.ndarray
    apart: np.ndarray

    @property
    def found(self) -> bool:
        """True if any position differs."""
        return bool(self.apart.any())

    @property
    def largest(self) -> float:
        """The largest absolute error among the positions that are too far apart; NaN where one side is not finite."""
        gap = np.abs(self.ours.astype(np.float64) - self.theirs.astype(np.float64))[self.apart]
        return float(np.max(gap)) if gap.size else 0.0


def difference(ours: Tensor, field: Field) -> Difference:
    """Compares one field; a value has to have as many elements as the recorded one."""
    theirs = field.value
    mine = ours.detach().resolve_conj().cpu().numpy().reshape(theirs.shape)
    apart = _apart(mine, theirs, field)
    if field.where is not None:
        counted = np.broadcast_to(
            field.where.reshape(field.where.shape + (1,) * (theirs.ndim - field.where.ndim)), theirs.shape
        )
        apart = apart & counted
    return Difference(mine, theirs, apart)


def _apart(mine: np.ndarray, theirs: np.ndarray, field: Field) -> np.ndarray:
    if theirs.dtype.kind != "f":
        return mine != theirs
    mine, wanted = mine.astype(np.float64), theirs.astype(np.float64)
    with np.errstate(invalid="ignore"):
        close = np.abs(mine - wanted) <= field.atol + field.rtol * np.abs(wanted)
    same = (mine == wanted) | (np.isnan(mine) & np.isnan(wanted))
    return ~np.where(np.isfinite(mine) & np.isfinite(wanted), close, same)
