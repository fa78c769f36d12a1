r"""Reductions: weights per token, which reduce a loss per token to a scalar.

A reduction gets the masks of the whole optimizer step of all ranks and returns :math:`w_{b,t}`; the loss is :math:`\sum
w_{b,t}\,\ell_{b,t}`. The weights are fixed before the first backward, so loss and gradient do not depend on the split
into microbatches and ranks. Denominators count every valid token, masked ones included.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rl.signal.masked import GlobalSum, group_numbers, local_sum

Tokens = Bool[Tensor, "B T"]
Rows = Bool[Tensor, " B"]
Groups = Int[Tensor, " B"]
Weights = Float[Tensor, "B T"]
Reduction = Callable[[Tensor, Tensor, Tensor, GlobalSum], Tensor]
"""``(valid_tokens [B, T], trained [B], groups [B], global_sum) -> weights [B, T] float64``, 0 at invalid tokens."""


def token_mean(valid_tokens: Tokens, trained: Rows, groups: Groups, global_sum: GlobalSum = local_sum) -> Weights:
    r"""Give every valid token of the step the same weight.

    .. math::
        w_{b,t} = \frac{1}{\sum_j |o_j|}

    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476.
    """
    del trained, groups
    tokens = global_sum(valid_tokens.sum().double())
    return valid_tokens.double() / tokens.clamp(min=1)


def sequence_mean(valid_tokens: Tokens, trained: Rows, groups: Groups, global_sum: GlobalSum = local_sum) -> Weights:
    r"""Give every trained row, empty ones included, the same weight, split equally among its tokens.

    .. math::
        w_{b,t} = \frac{1}{B\,|o_b|}

    Source: Shao et al. 2024 (GRPO), arXiv:2402.03300.
    """
    del groups
    rows = global_sum(trained.sum().double())
    tokens = valid_tokens.sum(-1, keepdim=True).clamp(min=1)
    return valid_tokens.double() / tokens / rows.clamp(min=1)


@dataclass(frozen=True, slots=True)
class SequenceSumNorm:
    r"""Sum over a row's tokens divided by a constant length, averaged over the trained rows.

    .. math::
        w_{b,t} = \frac{1}{B\,L}

    Source: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783.

    Args:
        length: Constant length, usually ``max_new_tokens``.

    Raises:
        ValueError: If ``length`` is not positive.
    """

    length: int

    def __post_init__(self) -> None:
        """Check the length."""
        if not isinstance(self.length, int) or self.length < 1:
            raise ValueError(f"expected length to be a whole number above 0, got {self.length!r}")

    def __call__(
        self, valid_tokens: Tokens, trained: Rows, groups: Groups, global_sum: GlobalSum = local_sum
    ) -> Weights:
        """Return weight ``1 / (length * rows)`` for every valid token."""
        del groups
        rows = global_sum(trained.sum().double())
        return valid_tokens.double() / self.length / rows.clamp(min=1)


def prompt_mean(valid_tokens: Tokens, trained: Rows, groups: Groups, global_sum: GlobalSum = local_sum) -> Weights:
    r"""Give every prompt the same weight, split equally among its valid tokens. Groups must not span ranks.

    .. math::
        w_{b,t} = \frac{1}{P \sum_{j \in \text{group}(b)} |o_j|}

    Source: the SkyRL reduction of this name.
    """
    index = group_numbers(groups)
    zeros = torch.zeros(len(groups), dtype=torch.float64, device=valid_tokens.device)  # at most one group per row
    tokens = zeros.index_add(0, index, valid_tokens.sum(-1).double())
    prompts = global_sum((zeros.index_add(0, index, trained.double()) > 0).sum().double())
    return valid_tokens.double() / tokens.clamp(min=1)[index][:, None] / prompts.clamp(min=1)


REDUCTIONS: dict[str, Reduction] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "prompt_mean": prompt_mean,
}


def resolve_reduction(reduction: Reduction | str, max_length: int) -> Reduction:
    """Return the reduction for an object, a function or a name; ``sequence_sum_norm`` divides by ``max_length``.

    Raises:
        ValueError: If the name is unknown, or for a class instead of an object.
    """
    reductions = {**REDUCTIONS, "sequence_sum_norm": SequenceSumNorm(max_length)}
    if isinstance(reduction, type):
        raise ValueError(f"expected an object as reduction, got the class {reduction.__name__}: call it")
    if callable(reduction):
        return reduction
    if not isinstance(reduction, str) or reduction not in reductions:
        names = ", ".join(reductions)
        raise ValueError(f"expected a reduction out of {names}, an object or a function, got {reduction!r}")
    return reductions[reduction]
