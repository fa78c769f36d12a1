"""Repetition: the share of n-grams that were said before, by hand."""

import pytest

from lightning_rl.rewards import Repetition


@pytest.mark.parametrize(
    ("n", "ids", "value"),
    [
        pytest.param(1, [], 0.0, id="empty"),
        pytest.param(2, [5], 0.0, id="shorter-than-n"),
        pytest.param(1, [5, 6, 7], 0.0, id="all-different"),
        pytest.param(1, [5, 5, 5, 5], -0.75, id="one-of-four"),
        pytest.param(2, [5, 6, 5, 6, 5], -0.5, id="two-of-four-pairs"),
        pytest.param(3, [5, 6, 5, 6, 5], -1 / 3, id="two-of-three-triples"),
        pytest.param(2, [5, 6, 6, 5], 0.0, id="order-matters"),
    ],
)
def test_table(n: int, ids: list[int], value: float) -> None:
    assert Repetition(n=n)(["?"], [""], completion_ids=[ids]) == pytest.approx([value])
    words = " ".join(f"w{token}" for token in ids)
    assert Repetition(n=n, unit="words")(["?"], [words]) == pytest.approx([value])
