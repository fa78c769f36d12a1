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

    It is unbiased, unlike 1 - (1 - c/n)^k, and the product does not overflow for large n.

    Source: Chen et al. 2021 (Evaluating Large Language Models Trained on Code), arXiv:2107.03374, eq. 1.

    Args:
        samples: Number n of samples of the prompt.
        solved: Number c of solved samples.
        k: Number of samples drawn, at most n.

    Raises:
        ValueError: Unless 1 <= k <= n and 0 <= c <= n.

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
    """Return the probability that the majority answer of a prompt's samples is correct.

    Every sample with an answer votes once; ties are broken at random, in expectation. An answer is as correct as the
    share of its samples that are solved. Without a vote it is 0.

    Source: Wang et al. 2022 (Self-Consistency), arXiv:2203.11171, section 2.

    Args:
        answers: Answer of each sample.
        solved: True for each solved sample.

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
    r"""Return a 95 % Wilson score interval for the mean of values in [0, 1], one per prompt.

    .. math::
        \frac{p + z^2 / 2N \pm z \sqrt{p (1 - p) / N + z^2 / 4N^2}}{1 + z^2 / N}

    It stays within [0, 1] and has a positive width if all values are equal. Prompts are the independent unit, because
    samples of one prompt are not independent. For values other than 0 and 1, N is the effective sample size
    :math:`N p (1 - p) / s^2` with the variance :math:`s^2` over prompts, divided by their number, at most
    the number of samples.

    Source: Wilson 1927, doi:10.1080/01621459.1927.10502953; for the effective N, Korn and Graubard 1998, Survey
    Methodology 24(2); for intervals over prompts, Miller 2024 (Adding Error Bars to Evals), arXiv:2411.00640.

    Args:
        values: Value of each prompt, at least one.
        samples: Number of samples per prompt.

    Example:
        >>> [round(bound, 4) for bound in interval([1.0] * 8 + [0.0] * 2)]
        [0.4902, 0.9433]
    """
    number = len(values)
    mean = math.fsum(values) / number
    variance, binary = math.fsum((value - mean) ** 2 for value in values) / number, mean * (1.0 - mean)
    ratio = 1.0 if binary <= 0.0 else binary / variance if variance > 0.0 else math.inf
    size, z = number * min(ratio, float(samples)), NORMAL_QUANTILE
    center = (mean + z**2 / (2 * size)) / (1 + z**2 / size)
    half = z * math.sqrt(max(binary, 0.0) / size + (z / (2 * size)) ** 2) / (1 + z**2 / size)
    return max(center - half, 0.0), min(center + half, 1.0)
