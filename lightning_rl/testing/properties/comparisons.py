"""Reasons of skipped checks, the tolerance of rounding, and comparisons of tensors."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_rl.utils.finding import Finding

ScaleT = TypeVar("ScaleT", float, Tensor)
NO_ROWS = "no checked row trains"
MIXED_UP = "completions do not belong to their requests, see trained_tokens"


@dataclass(frozen=True, slots=True)
class Skip:
    """Result of a check that could not run: it neither passed nor failed.

    Attributes:
        why: Reason, as one clause such as ``"the engine returns no log-probabilities"``.
    """

    why: str


def rounding(dtype: torch.dtype, scale: ScaleT, operations: int = 64) -> ScaleT:
    r"""Return the largest difference that rounding makes between two computations of a number; all checks use it.

    An operation in floating point errs by at most :math:`u = \epsilon/2` of its result. After n of them on numbers no
    larger than :math:`s`, a result is within :math:`n u s` of the exact one, to first order, and two results are within
    :math:`2 n u s = n \epsilon s` of each other. Numbers count with their size before a subtraction: a mean subtracted
    from rewards of 1000 leaves the rounding of 1000. A later factor multiplies the rounding too.

    Source: Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 3.1.

    Args:
        dtype: Coarsest dtype of the computation. At least float32 is assumed, since parts of it may run in float32.
        scale: Largest intermediate number times later factors; a number or a tensor.
        operations: Number of successive operations; sums of n numbers in a tree or in blocks need far fewer than n.
    """
    return scale * (operations * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps))


def differences(
    ours: Tensor,
    theirs: Tensor,
    sample_ids: Tensor,
    *,
    culprit: str = "",
    expected: str = "",
    observed: str = "",
    rtol: float | None = None,
    atol: float | Tensor | None = None,
) -> Iterator[Finding]:
    """Yield one finding with a few samples and positions at which two tensors [B] or [B, T] differ, or none.

    The default tolerances are :func:`rounding` of the largest number and of each number.
    """
    one, other = ours.double(), theirs.double()
    dtype = max((part.dtype for part in (ours, theirs) if part.is_floating_point()), key=_coarseness, default=None)
    dtype, size = dtype or torch.float64, torch.where(torch.isfinite(other), other.abs(), 0.0)
    if atol is None:
        atol = rounding(dtype, float(size.max()) if size.numel() else 0.0)
    if rtol is None:
        rtol = rounding(dtype, 1.0, 1024)
    same = (one == other) | (one.isnan() & other.isnan())
    places = (~same & ~((one - other).abs() <= atol + rtol * size)).nonzero()[:8]
    if len(places):
        yield Finding(
            culprit=culprit,
            expected=expected,
            observed=observed,
            samples=[int(sample_ids[row]) for row in places[:, 0].unique()],
            positions=sorted({int(place[1]) for place in places}) if places.shape[-1] > 1 else (),
        )


def _coarseness(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def gradient_of(per_token: Tensor, leaf: Tensor) -> Tensor:
    """Return the gradient of a sum with respect to a leaf; zeros if the sum does not depend on it."""
    if not per_token.requires_grad:
        return torch.zeros_like(leaf)
    return torch.autograd.grad(per_token.sum(), leaf, allow_unused=True, materialize_grads=True)[0]


def reads_parameters(per_token: Tensor) -> bool:
    """Return True if the graph of a tensor ends at a parameter of a model, not only at log-probabilities."""
    seen, nodes = set[object](), [per_token.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False


def bitwise_equal(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors hold the same numbers, with NaN at the same places."""
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or bool(torch.isclose(one.double(), other.double(), 0, 0, equal_nan=True).all())
