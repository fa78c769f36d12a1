"""Calls of other systems' functions with parameters that no recorded call has, for comparison with a formula."""

from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import numpy as np
import torch
from goldens.cases import Case, Field, Outputs
from goldens.params import Params
from goldens.registry import replay_of
from goldens.verdict import Status, verdict
from torch import Tensor

ROWS, LENGTH = 6, 7
Formula = Callable[[Tensor], Tensor]  # from the log-probabilities to the loss


def inputs(seed: int = 0) -> dict[str, Tensor]:
    """Return rows with a hole, a late begin and an empty row, and policies that differ by a few tenths."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)  # noqa: E731
    mask = torch.arange(LENGTH) < torch.tensor([7, 5, 6, 3, 0, 4])[:, None]
    mask[0, 3], mask[2, 0] = False, False
    old = -draw(ROWS, LENGTH).abs() - 0.05
    return {
        "logp": old + 0.3 * draw(ROWS, LENGTH),
        "old_logp": old,
        "rollout_logp": old + 0.25 * draw(ROWS, LENGTH),
        "ref_logp": old + 0.4 * draw(ROWS, LENGTH),
        "adv": draw(ROWS, LENGTH),
        "mask": mask,
    }


def call(
    function: str, peer: str, topic: str, params: dict[str, Any], arrays: dict[str, Tensor], outputs: str = ""
) -> Case:
    """Return a call of a function that recorded loss, gradient and other outputs, with arbitrary values."""
    field = Field(value=np.zeros(()), rtol=0.0, atol=0.0, where=None)
    return Case(
        id="synthetic",
        topic=topic,
        peer=peer,
        function=function,
        algorithm="unrecorded",
        variant="",
        params=Params(params),
        implicit={},
        tags=(),
        arrays={name: value.numpy() for name, value in arrays.items()},
        outputs=dict.fromkeys(["loss", "grad_logp", *outputs.split()], field),
    )


def replayed(case: Case) -> Outputs:
    """Return the outputs of a replay, which has to read every parameter."""
    found = replay_of(case)(case)
    assert isinstance(case.params, Params) and case.params.unread() == {}
    return found


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.detach().double(), theirs.detach().double(), rtol=1e-4, atol=1e-6)


def agrees(case: Case, formula: Formula) -> Outputs:
    """Compare loss and gradient of a replay with those of a formula, and return all outputs of the replay."""
    found, logp = replayed(case), case["logp"].requires_grad_()
    loss = formula(logp)
    (gradient,) = torch.autograd.grad(loss, logp, allow_unused=True)
    same(found["loss"], loss)
    same(found["grad_logp"], torch.zeros_like(logp) if gradient is None else gradient)
    return found


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def kl(name: str, logp: Tensor, other: Tensor) -> Tensor:
    gap = logp - other
    return {"k1": gap, "abs": gap.abs(), "k2": gap.square() / 2, "k3": (-gap).exp() - 1 + gap}[name]


def options(every: int = 1, **values: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Return the combinations of some values, or one out of ``every`` of them."""
    return (dict(zip(values, chosen, strict=True)) for chosen in islice(product(*values.values()), 0, None, every))


def not_offered(case: Case) -> str:
    """Return the parameter that is not offered, as a verdict names it."""
    found = verdict(case)
    assert found.status is Status.NOT_OFFERED, found.detail
    return found.detail
