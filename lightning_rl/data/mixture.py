"""Mixture of sources: which source each place of the stream takes a row from, and the order of the rows of a source."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_rl.utils.arguments import check_numbers
from lightning_rl.utils.naming import in_words


def whole_weights(weights: Mapping[str, float], names: Sequence[str]) -> list[int]:
    """Return weights of sources in the proportions of those of a user, as whole numbers in the order of ``names``.

    Raises:
        ValueError: If a name is missing or unknown, a weight is negative, or all are 0.
    """
    if weights.keys() != set(names):
        raise ValueError(
            f"expected a weight for each of {in_words(names)}, got weights of {in_words(weights) or 'none'}: pass the "
            "names of the mapping prompts="
        )
    for name, weight in weights.items():
        check_numbers(at_least=0, finite=True, **dict[str, Any]({f"weight of {name}": weight}))
    parts = [Fraction(weights[name]).limit_denominator(10**9) for name in names]
    if not any(parts):
        raise ValueError(f"expected a weight above 0 in weights=, got {dict(weights)}")
    scale = math.lcm(*(part.denominator for part in parts))
    return [int(part * scale) for part in parts]


def pick_source(place: int, weights: Sequence[int]) -> tuple[int, int]:
    """Return the source of a place of the stream, and the number of earlier places that have it.

    The sources are halved until one is left. At each halving, the first half has the rounded share of the places so
    far, so the count of each source differs from its share by about one at every place, and by nothing at multiples of
    the sum of the weights.

    Example:
        >>> [pick_source(place, [2, 1]) for place in range(4)]
        [(0, 0), (1, 0), (0, 1), (0, 2)]
    """
    source = 0
    while len(weights) > 1:
        half, total = len(weights) // 2, sum(weights)
        share = sum(weights[:half])
        before, after = ((2 * number * share + total) // (2 * total) for number in (place, place + 1))
        if after > before:
            place, weights = before, weights[:half]
        else:
            place, weights, source = place - before, weights[half:], source + half
    return source, place


@lru_cache(maxsize=2)
def pass_order(size: int, *key: int) -> Tensor:
    """Return the order of the rows of a source in a pass; ``key`` is the seed, the pass, and the source if not 0."""
    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    return torch.randperm(size, generator=generator)


def rows_of_picks(picks: Sequence[tuple[int, int]], sizes: Sequence[int], seed: int | None) -> list[int]:
    """Return the number of the row within its source for each pick of :func:`pick_source`, pass after pass.

    Args:
        picks: Source, and number of rows that it has given before.
        sizes: Number of rows of each source.
        seed: Seed of the shuffling; None for the order of the rows.
    """
    places = [(source, *divmod(number, sizes[source])) for source, number in picks]
    if seed is None:
        return [offset for _, _, offset in places]
    passes = sorted({(source, number) for source, number, _ in places})
    orders = {key: pass_order(sizes[key[0]], seed, key[1], *key[:1] * (key[0] > 0)) for key in passes}
    return [int(orders[source, number][offset]) for source, number, offset in places]
