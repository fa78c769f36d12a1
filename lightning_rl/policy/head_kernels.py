"""Triton kernels of the vocabulary head: one pass over a row of logits in the forward, and one in the backward.

A program processes a row. In the forward each of its lanes keeps the largest of its logits, the sum of exponentials
relative to it, and the sum of these times their distance from it, and rescales both sums whenever the largest grows.
The backward writes the gradient in place of the logits. A logit of -inf has probability 0.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867 (the sum); the entropy is computed from the second sum.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

LANES, WARPS = 4096, 8


def score_rows(
    logits: Float[Tensor, "A V"],
    targets: Int[Tensor, " A"],
    logprobs: Float[Tensor, " A"],
    entropy: Float[Tensor, " A"],
    normalizer: Float[Tensor, " A"],
) -> None:
    """Compute the log-probability of each target, the entropy, and the logarithm of the sum of exponentials.

    Args:
        logits: Contiguous logits in float32, which stay as they are.
        targets: Token ids.
        logprobs: Result in nats.
        entropy: Result in nats.
        normalizer: Result.
    """
    rows, vocabulary = logits.shape
    with torch.cuda.device_of(logits):
        _score_row[(rows,)](logits, targets, logprobs, entropy, normalizer, vocabulary, lanes=LANES, num_warps=WARPS)


def write_gradient(
    logits: Float[Tensor, "A V"],
    targets: Int[Tensor, " A"],
    normalizer: Float[Tensor, " A"],
    entropy: Float[Tensor, " A"],
    *,
    by_logprob: Float[Tensor, " A"],
    by_entropy: Float[Tensor, " A"] | None,
    cap: float | None,
) -> None:
    """Overwrite logits with their gradient.

    Args:
        logits: Contiguous logits in float32.
        targets: Token ids.
        normalizer: Result of :func:`score_rows`.
        entropy: Result of :func:`score_rows`.
        by_logprob: Gradient of the log-probabilities.
        by_entropy: Gradient of the entropies; None for zeros.
        cap: Bound of the logits; the gradient is then that of the logits before the cap.
    """
    rows, vocabulary = logits.shape
    inputs = logits, targets, normalizer, entropy, by_logprob, by_entropy
    with torch.cuda.device_of(logits):
        _write_row[(rows,)](*inputs, vocabulary, cap=cap, lanes=LANES, num_warps=WARPS)


@triton.jit
def _score_row(logits, targets, logprobs, entropy, normalizer, vocabulary, lanes: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocabulary
    largest = tl.full([lanes], -1e30, tl.float32)  # finite, so that a difference from it is a number
    total = tl.zeros([lanes], tl.float32)
    spread = tl.zeros([lanes], tl.float32)
    for start in range(0, vocabulary, lanes):
        column = start + tl.arange(0, lanes)
        logit = tl.load(logits + column, mask=column < vocabulary, other=float("-inf"))
        larger = tl.maximum(largest, logit)
        shift, distance = largest - larger, logit - larger
        scale, weight = tl.exp(shift), tl.exp(distance)
        spread = (spread + total * shift) * scale + tl.where(weight > 0, weight * distance, 0.0)
        total = total * scale + weight
        largest = larger
    top = tl.max(largest, 0)
    shift = largest - top
    scale = tl.exp(shift)
    spread = tl.sum((spread + total * shift) * scale, 0)
    total = tl.sum(total * scale, 0)
    logarithm = tl.log(total)
    tl.store(logprobs + row, tl.load(logits + tl.load(targets + row)) - top - logarithm)
    tl.store(entropy + row, logarithm - spread / total)
    tl.store(normalizer + row, top + logarithm)


@triton.jit
def _write_row(
    logits, targets, normalizers, entropies, by_logprob, by_entropy, vocabulary, cap: tl.constexpr, lanes: tl.constexpr
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocabulary
    target, normalizer, entropy = tl.load(targets + row), tl.load(normalizers + row), tl.load(entropies + row)
    slope = tl.load(by_logprob + row)
    for start in range(0, vocabulary, lanes):
        column = start + tl.arange(0, lanes)
        inside = column < vocabulary
        logit = tl.load(logits + column, mask=inside, other=float("-inf"))
        score = logit - normalizer
        probability = tl.exp(score)
        gradient = tl.where(column == target, slope, 0.0) - probability * slope
        if by_entropy is not None:  # dH/dz = -p (log p + H)
            by_score = probability * (score + entropy) * tl.load(by_entropy + row)
            gradient -= tl.where(probability > 0, by_score, 0.0)
        if cap is not None:
            share = logit / cap
            gradient *= tl.maximum(1 - share * share, 0.0)
        tl.store(logits + column, gradient, mask=inside)
