"""Sums of different parts that are equal in decimal arithmetic are equal numbers."""

import pytest
import torch

from lightning_rl.signal.rounded_sum import rounded_sum

EQUAL: dict[str, list[list[float]]] = {  # rows with one sum
    "seven and one": [[0.7, 0.1], [0.6, 0.2], [0.5, 0.3], [0.8, 0.0]],
    "ten tenths": [[0.1] * 10, [1.0] + [0.0] * 9, [0.2] * 5 + [0.0] * 5],
    "difference": [[0.3, -0.2], [0.1, 0.0], [1.1, -1.0], [100.1, -100.0]],
    "cancelled": [[0.1, 0.2, -0.3], [0.0, 0.0, 0.0], [0.7, -0.6, -0.1]],
    "large": [[1e8, 0.1, 0.2], [1e8, 0.3, 0.0], [1e8 + 0.3, 0.0, 0.0]],
    "small": [[1e-9, 2e-9], [3e-9, 0.0], [4e-9, -1e-9]],
    "negative": [[-0.1, -0.2], [-0.3, 0.0], [0.4, -0.7]],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("row", EQUAL)
def test_equal_sums_are_equal_numbers(row: str, dtype: torch.dtype) -> None:
    parts = torch.tensor(EQUAL[row], dtype=torch.float64)
    first, *others = parts.unbind(-1)
    others = [part.to(dtype) for part in others]
    for order in ([first, *others], [*reversed(others), first]):
        total, *further = rounded_sum(order).tolist()
        assert further == [total] * len(further)


def test_nothing_else_is_lost() -> None:
    parts = [torch.tensor([1e8, 1e8, 1e8], dtype=torch.float64), torch.tensor([0.0, 1e-3, 0.25], dtype=torch.float64)]
    assert rounded_sum(parts).tolist() == [1e8, 1e8 + 1e-3, 1e8 + 0.25]
    alone = torch.tensor([1 / 3, 1e8 + 1e-7, 5e-324], dtype=torch.float64)
    assert rounded_sum([alone]).tolist() == alone.tolist()
    assert rounded_sum([alone, torch.zeros(3)]).tolist() == pytest.approx(alone.tolist(), rel=1e-12)


def test_what_is_not_finite_stays_so() -> None:
    parts = [torch.tensor([torch.inf, torch.nan, -torch.inf]), torch.ones(3)]
    assert str(rounded_sum(parts).tolist()) == "[inf, nan, -inf]"
