"""GPG: centred rewards over the share of rows that teach."""

from collections.abc import Callable

import pytest
import torch
from kit.support import in_lockstep
from torch import Tensor

from lightning_rl.advantages import GPG
from lightning_rl.signal.masked import GlobalSum


@pytest.mark.parametrize(
    ("teaches", "scores", "groups", "rewarded", "expected"),
    [
        pytest.param("different", [1, 0, 1, 1], [0, 0, 1, 1], [1] * 4, [1, -1, 0, 0], id="half-of-the-rows-teach"),
        pytest.param("different", [1, 0, 3, 1], [0, 0, 1, 1], [1] * 4, [0.5, -0.5, 1, -1], id="all-teach"),
        pytest.param("different", [1, 0, 9], [0, 0, 1], [1] * 3, [0.75, -0.75, 0], id="a-group-of-one-does-not"),
        pytest.param(
            "different", [1, 0, 9, 9], [0, 0, 1, 1], [1, 1, 0, 0], [0.5, -0.5, 0, 0], id="left-out-not-counted"
        ),
        pytest.param("different", [2, 2], [0, 0], [1, 1], [0, 0], id="none-teaches"),
        pytest.param("nonzero", [1, 0, 0, 0], [0, 0, 1, 1], [1] * 4, [2, -2, 0, 0], id="nonzero-one-of-four"),
        pytest.param("nonzero", [1, 0, 1, 1], [0, 0, 1, 1], [1] * 4, [2 / 3, -2 / 3, 0, 0], id="nonzero-three-of-four"),
        pytest.param("nonzero", [0, 0], [0, 0], [1, 1], [0, 0], id="nonzero-none"),
    ],
)
def test_hand_worked_batches(
    teaches: str, scores: list[float], groups: list[int], rewarded: list[int], expected: list[float]
) -> None:
    estimator = GPG(teaches=teaches)  # pyrefly: ignore[bad-argument-type]
    given = torch.tensor(scores, dtype=torch.float64), torch.tensor(groups), torch.tensor(rewarded).bool()
    torch.testing.assert_close(estimator.per_row(*given), torch.tensor(expected, dtype=torch.float64))


def test_rows_of_all_ranks_are_counted() -> None:
    groups, rewarded = torch.tensor([0, 0]), torch.tensor([True, True])
    scores = [torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])]

    def on(rank: int) -> Callable[[GlobalSum], Tensor]:
        return lambda global_sum: GPG().per_row(scores[rank], groups, rewarded, global_sum)

    first, second = in_lockstep(on(0), on(1))
    assert first.tolist() == [1.0, -1.0] and second.tolist() == [0.0, 0.0]
