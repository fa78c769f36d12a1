"""Length by hand: bounds, target, margin and unit."""

from typing import Any

import pytest

from lightning_rl.rewards import Length


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"max_length": 2}, [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]),
        ({"min_length": 2}, [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]),
        ({"min_length": 1, "max_length": 2, "margin": 2}, [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]),
        ({"target": 3, "margin": 4}, [0.25, 0.5, 0.75, 1.0, 0.75, 0.5]),
        ({"target": 0}, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
        ({"max_length": 0, "margin": 5}, [1.0, 0.8, 0.6, 0.4, 0.2, 0.0]),
    ],
)
def test_table(options: dict[str, Any], values: list[float]) -> None:
    ids = [[7] * number for number in range(6)]
    letters = ["x" * number for number in range(6)]
    assert Length(**options)(["?"] * 6, [""] * 6, completion_ids=ids) == pytest.approx(values)
    characters = Length(**options, unit="characters")
    assert characters(["?"] * 6, letters, completion_ids=[[]] * 6) == pytest.approx(values)


def test_a_target_for_each_row() -> None:
    reward = Length(target="wanted", margin=2)
    assert reward(["?"] * 3, [""] * 3, completion_ids=[[1], [1], [1]], wanted=[1, 2, None]) == [1.0, 0.5, None]
