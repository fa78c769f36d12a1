"""Changed copies of rows, and the rows of which a contribution changes with them."""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rl.corrections import LossView
from lightning_rl.rollout import TOKEN, Rollout, RolloutT
from lightning_rl.testing.properties.case import CorrectionMethod, pattern_of
from lightning_rl.testing.properties.comparisons import bitwise_equal

FEW_TOKENS, MUCH_WIDER = 16, 16  # positions of a row; factor of the width
SIZES = [1e-4 * 3.5**power for power in range(11)]  # of log-probabilities and values, in nats; up to 28
ROW_MASKS = ("reward_mask", "exclude")
METRICS = "rollout_metrics"


class Change(NamedTuple):
    """A changed copy of rows on which contributions to each row must stay the same.

    Attributes:
        expected: Expected value in findings.
        rollout: Changed copy.
        rows: Indices of its rows in the original.
    """

    expected: str
    rollout: Rollout
    rows: Tensor


def moved_rows(contribution: CorrectionMethod, rollout: Rollout, change: Change, said: Any = None) -> Tensor:
    """Return the rows of a changed copy with another contribution, [b] bool, in the order of the copy."""
    theirs = contribution.by_name(contribution(change.rollout) if said is None else said)
    moved = torch.zeros_like(change.rows, dtype=torch.bool)
    for name, tensor in contribution.tensors(rollout).items():
        if contribution.method == METRICS:
            moved = moved | ~close(tensor, theirs[name]).all()
            continue
        mine, other = tensor[change.rows], theirs[name]
        if mine.dim() > 1:
            inside = change.rollout.valid_tokens[:, : rollout.width]
            mine, other = (torch.where(inside, part[:, : rollout.width], 0) for part in (mine, other))
        moved = moved | ~close(mine, other).reshape(len(mine), -1).all(-1)
    return moved


def close(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the places at which two tensors are equal up to rounding, in the shape of both."""
    if not ours.is_floating_point():
        return ours == theirs
    scale = float(ours.double().nan_to_num(posinf=0.0, neginf=0.0).abs().max()) if ours.numel() else 0.0
    return torch.isclose(ours.double(), theirs.double(), rtol=1e-4, atol=1e-5 * max(scale, 1e-3), equal_nan=True)


def counts_padding(contribution: CorrectionMethod, rows: RolloutT) -> Change | None:
    """Return a wide copy of rows on which a contribution differs from that without padding; None if there is none.

    A mean over padding shrinks with the width. A decision shows it only if its threshold is between the two means, so
    all float fields of the rows take sizes of a grid that is finer than the ratio of the means of squares.
    """
    if not rows.valid_tokens.any():
        return None
    rows = rows.fit_width(min(rows.width, FEW_TOKENS)).sanitize()
    everything = torch.arange(len(rows), device=rows.groups.device)
    pattern, signs = 1.0 + 0.5 * pattern_of(rows), 1.0 - 2.0 * (everything % 2)[:, None]
    for size, turn, sign in itertools.product(SIZES, (0, 1), (1.0, -1.0)):
        number = itertools.count()

        def move(tensor: Tensor, axis: object, _pad: float, size: float = size, turn: int = turn) -> Tensor:
            if axis != TOKEN or not tensor.is_floating_point() or tensor.dim() != 2:
                return tensor
            place = next(number)  # noqa: B023  of the fields of one copy
            moved = -size * (20 - place if turn else 2 + place) * pattern
            return torch.where(rows.valid_tokens, moved, 0.0).to(tensor.dtype)

        plain = rows.map(move)
        if plain.advantages is not None:
            plain = plain.replace(advantages=(sign * signs * rows.valid_tokens).to(plain.advantages.dtype))
        if isinstance(plain, LossView):
            plain = plain.replace(entropy=plain.entropy.abs())
        wide = plain.fit_width(MUCH_WIDER * rows.width)
        change = Change("the same with more padding behind responses", wide, everything)
        if moved_rows(contribution, plain, change).any():
            return change
    return None


def repeats_itself(contribution: CorrectionMethod, rollout: Rollout) -> bool:
    """Return True if two calls give the same contribution; :func:`contributions_fit` reports others."""
    return alike(contribution.tensors(rollout), contribution.tensors(rollout))


def alike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return True if two contributions are bitwise equal."""
    return one.keys() == other.keys() and all(bitwise_equal(one[name], other[name]) for name in one)
