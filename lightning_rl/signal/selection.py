"""Selection of tokens by a statistic of the whole optimizer step, independent of microbatches and ranks.

Each function takes and returns one tensor per microbatch. Ties at a threshold are all selected, so the order of rows
and ranks does not matter.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rl.signal.masked import GlobalSum, local_sum, masked_fill_invalid, prefix_sums

GlobalConcat = Callable[[Tensor], Tensor]
"""Concatenates tensors [N] of all ranks, in rank order; N may differ. Every rank calls it the same number of times."""


def local_values(values: Tensor) -> Tensor:
    """Return the tensor itself: the :data:`GlobalConcat` of a single rank."""
    return values


def covariances(
    logprobs: Sequence[Float[Tensor, "b T"]],
    advantages: Sequence[Float[Tensor, "b T"]],
    valid_tokens: Sequence[Bool[Tensor, "b T"]],
    global_sum: GlobalSum = local_sum,
) -> list[Float[Tensor, "b T"]]:
    r"""Return each token's :math:`(A - \bar A)(\log p - \overline{\log p})`, in float64; 0 if masked.

    Source: Cui et al. 2025 (The entropy mechanism), arXiv:2505.22617, eq. 10.
    """
    exact = [
        [masked_fill_invalid(value.detach(), valid).double() for value, valid in zip(values, valid_tokens, strict=True)]
        for values in (logprobs, advantages)
    ]
    number = global_sum(torch.stack([valid.sum().double() for valid in valid_tokens]).sum()).clamp(min=1)
    means = [global_sum(torch.stack([value.sum() for value in values]).sum()) / number for values in exact]
    return [
        torch.where(valid, (logprob - means[0]) * (advantage - means[1]), 0.0)
        for logprob, advantage, valid in zip(*exact, valid_tokens, strict=True)
    ]


def largest(
    scores: Sequence[Float[Tensor, "b T"]],
    candidates: Sequence[Bool[Tensor, "b T"]],
    number: int,
    global_concat: GlobalConcat = local_values,
) -> list[Bool[Tensor, "b T"]]:
    """Return a mask of the ``number`` candidates with the largest scores of all ranks, ties included."""
    local = torch.cat([score[candidate].flatten() for score, candidate in zip(scores, candidates, strict=True)])
    ordered = global_concat(local).sort(descending=True).values
    threshold = ordered[min(number, len(ordered)) - 1] if number and len(ordered) else torch.inf
    return [candidate & (score >= threshold) for score, candidate in zip(scores, candidates, strict=True)]


def smallest_with_mean_below(
    scores: Sequence[Float[Tensor, "b T"]],
    valid_tokens: Sequence[Bool[Tensor, "b T"]],
    threshold: float,
    global_concat: GlobalConcat = local_values,
) -> list[Bool[Tensor, "b T"]]:
    """Return a mask of the valid tokens with the smallest scores whose mean is below a threshold, at least one.

    Source: Zheng et al. 2025 (M2PO), arXiv:2510.01161, with squared log-ratios as scores.
    """
    local = torch.cat([score[valid].flatten() for score, valid in zip(scores, valid_tokens, strict=True)])
    ordered = global_concat(local.double()).sort().values
    means = prefix_sums(ordered) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    kept = max(int((means < threshold).sum()), 1)
    bound = ordered[kept - 1] if len(ordered) else torch.inf
    return [valid & (score.double() <= bound) for score, valid in zip(scores, valid_tokens, strict=True)]


def shuffled_keys(sample_ids: Int[Tensor, " b"], width: int) -> Float[Tensor, "b T"]:
    """Return a pseudorandom number in [0, 1) per position of each sample, a function of both.

    Source: the finaliser of Steele, Lea and Flood 2014 (SplittableRandom).
    """
    positions = torch.arange(1, width + 1, device=sample_ids.device)  # not 0, a fixed point of the finalizer
    mixed = sample_ids[:, None] * 0x9E3779B97F4A7C1 + positions * 0x2545F4914F6CDD1D
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ _logical_shift(mixed, shift)) * factor
    return _logical_shift(mixed ^ _logical_shift(mixed, 31), 11).double() / 2**53


def _logical_shift(values: Tensor, places: int) -> Tensor:
    return (values >> places) & (2 ** (64 - places) - 1)  # >> of a signed integer copies its sign
