"""Ids and seeds of samples never change, and their ranges are apart."""

import pytest

from lightning_rl.samples.seeds import (
    ENVIRONMENTS,
    EVALUATION,
    GREEDY,
    environment_seed,
    evaluation_seed,
    request_seed,
    sample_id,
    turn_seed,
)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (sample_id(64, 3, 8), 515),
        (sample_id(64, 0, 1, first=GREEDY), 2**62 + 64),
        (sample_id(64, 3, 4, first=2 * EVALUATION), 2**41 + 259),
        (request_seed(1, 2, 515), 1142492000),
        (request_seed(1, 2, GREEDY + 64), 1386875665),
        (turn_seed(5, 2), 838720479),
        (environment_seed(1, 64), 972239745),
        (evaluation_seed(1, "math", 64, 3), 526656131),
    ],
)
def test_ids_and_seeds_never_change_between_versions_of_the_library(number: int, expected: int) -> None:
    assert number == expected


def test_ranges_of_ids_are_apart() -> None:
    assert EVALUATION * 2**20 < ENVIRONMENTS < GREEDY - 2**60 and GREEDY + 2**60 < 2**63
