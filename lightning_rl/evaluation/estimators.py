r"""Estimators of one prompt from its samples, and the interval of their mean over prompts."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import NormalDist

NORMAL_QUANTILE = NormalDist().inv_cdf(0.975)  # two sides of 95 %


def pass_at_k(samples: int, solved: int, k: int) -> float:
    r"""Probability that at least one of k samples, drawn without replacement from those of a prompt, is solved.

    .. math::
        1 - \binom{n - c}{k} / \binom{n}{k} = 1 - \prod_{i = n - c + 1}^{n} \left( 1 - \frac{k}{i} \right)

    Its expectation over the n samples is the probability that k fresh samples hold a solved one. The product overflows
    for no n; 1 - (1 - c/n)^k would be biased.

    Source: Chen et al. 2021 (Evaluating Large Language Models Trained on Code), arXiv:2107.03374, eq. 1.

    Args:
        samples: n, of the prompt.
        solved: c, how many of them are solved.
        k: at most n.

    Raises:
        ValueError: unless 1 <= k <= n and 0 <= c <= n.

    Example:
        >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
        (0.25, 0.5, 1.0)
    """
    if not (1 <= k <= samples and 0 <= solved <= samples):
        raise ValueError(f"expected 1 <= k <= samples and 0 <= solved <= samples, got {k}, {samples} and {solved}")
    if samples - solved < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - solved + 1, samples + 1))


def majority(answers: Sequence[Hashable | None], solved: Sequence[bool]) -> float:
    """Probability that the answer which most samples of a prompt give is right.

    Every sample with an answer votes once; among answers with equally many votes one is drawn at random, so what is
    returned is the share of them that are right. An answer is as right as the share of its samples that are solved, 0
    or 1 for any reward that looks at the answer alone. Without a vote it is 0.

    Source: Wang et al. 2022 (Self-Consistency), arXiv:2203.11171, section 2.

    Args:
        answers: of each sample.
        solved: whether each sample is.

    Example:
        >>> majority(["7", "8", "8"], [True, False, False]), majority(["7", "8", None], [True, False, False])
        (0.0, 0.5)
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    tied = [answer for answer, number in votes.items() if number == most]
    right = sum(bool(is_solved) for answer, is_solved in zip(answers, solved, strict=True) if answer in tied)
    return right / (most * len(tied))


def interval(values: Sequence[float], samples: int = 1) -> tuple[float, float]:
    r"""A 95 % interval for the mean of values in [0, 1], one for each prompt: Wilson's score interval.

    .. math::
        \frac{p + z^2 / 2N \pm z \sqrt{p (1 - p) / N + z^2 / 4N^2}}{1 + z^2 / N}

    It stays within [0, 1] and has a width where all values are alike, which mean and deviation alone would not give.
    Prompts are what is drawn; samples of one prompt are not independent. For values that are not 0 or 1, N is the
    number of prompts that would vary as much if they were, :math:`N p (1 - p) / s^2` with the variance :math:`s^2` over
    the prompts, and at most the number of samples.

    Source: Wilson 1927, doi:10.1080/01621459.1927.10502953; for the effective N, Korn and Graubard 1998, Survey
    Methodology 24(2); for intervals over prompts, Miller 2024 (Adding Error Bars to Evals), arXiv:2411.00640.

    Args:
        values: of each prompt, at least one.
        samples: of each prompt.

    Example:
        >>> [round(bound, 4) for bound in interval([1.0] * 8 + [0.0] * 2)]
        [0.4902, 0.9433]
    """
    number = len(values)
    mean = math.fsum(values) / number
    variance, binary = math.fsum((value - mean) ** 2 for value in values) / number, mean * (1.0 - mean)
    ratio = 1.0 if binary <= 0.0 else binary / variance if variance > 0.0 else math.inf
    size, z = number * min(ratio, float(samples)), NORMAL_QUANTILE
    centre = (mean + z**2 / (2 * size)) / (1 + z**2 / size)
    half = z * math.sqrt(max(binary, 0.0) / size + (z / (2 * size)) ** 2) / (1 + z**2 / size)
    return max(centre - half, 0.0), min(centre + half, 1.0)
