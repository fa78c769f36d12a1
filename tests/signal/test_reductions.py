"""Reductions: a weight for each token that does not depend on how the step is cut."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import SequenceSumNorm, prompt_mean, sequence_mean, token_mean
from lightning_rl.signal.masked import GlobalSum, local_sum
from lightning_rl.signal.reductions import Reduction, resolve_reduction

VALID = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [0, 1, 1], [0, 0, 0]], dtype=torch.bool)
TRAINED = torch.tensor([True, True, True, True, False])  # the third row is trained without a token, the last is padding
GROUPS = torch.tensor([0, 0, 0, 7, -1])
ALL: list[Reduction] = [token_mean, sequence_mean, SequenceSumNorm(4), prompt_mean]
each = pytest.mark.parametrize(
    "reduction", ALL, ids=["token_mean", "sequence_mean", "sequence_sum_norm", "prompt_mean"]
)


def weights(reduction: Reduction, rows: slice = slice(None), total: GlobalSum = local_sum) -> Tensor:
    return reduction(VALID[rows], TRAINED[rows], GROUPS[rows], total)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        pytest.param(token_mean, [1 / 6, 1 / 6, 1 / 6], id="token_mean"),
        pytest.param(sequence_mean, [1 / 12, 1 / 4, 1 / 8], id="sequence_mean-counts-rows-without-tokens"),
        pytest.param(SequenceSumNorm(4), [1 / 16, 1 / 16, 1 / 16], id="sequence_sum_norm"),
        pytest.param(prompt_mean, [1 / 8, 1 / 8, 1 / 4], id="prompt_mean"),
    ],
)
def test_hand_worked_weights(reduction: Reduction, expected: list[float]) -> None:
    per_row = torch.tensor([expected[0], expected[1], 0, expected[2], 0], dtype=torch.float64)
    found = weights(reduction)
    assert found.dtype == torch.float64
    assert_close(found, per_row[:, None] * VALID)


@each
def test_padding_rows_and_padding_columns_weigh_nothing_and_change_nothing(reduction: Reduction) -> None:
    wide = torch.nn.functional.pad(VALID[:4], (0, 2))
    found = reduction(wide, TRAINED[:4], GROUPS[:4], local_sum)
    assert torch.equal(found[:, :3], weights(reduction)[:4]) and not found[:, 3:].any()
    assert not weights(reduction)[4].any()


@each
@pytest.mark.parametrize("rows", [0, 3])
def test_a_step_without_a_valid_token_weighs_0_and_not_nan(reduction: Reduction, rows: int) -> None:
    nothing = torch.zeros(rows, 2, dtype=torch.bool)
    for trained in (nothing.any(-1), ~nothing.any(-1)):
        found = reduction(nothing, trained, torch.arange(rows), local_sum)
        assert found.shape == (rows, 2) and not found.any()


def test_names_resolve_and_an_unknown_one_lists_them() -> None:
    assert resolve_reduction("token_mean", 9) is token_mean
    assert resolve_reduction("sequence_mean", 9) is sequence_mean
    assert resolve_reduction("prompt_mean", 9) is prompt_mean
    assert resolve_reduction("sequence_sum_norm", 9) == SequenceSumNorm(9)
    assert resolve_reduction(token_mean, 9) is token_mean
    with pytest.raises(ValueError, match=r"token_mean, sequence_mean, prompt_mean, sequence_sum_norm, an object or a"):
        resolve_reduction("mean", 9)
    with pytest.raises(ValueError, match="an object or a function, got None"):
        resolve_reduction(None, 9)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match="expected an object as reduction, got the class SequenceSumNorm: call it"):
        resolve_reduction(SequenceSumNorm, 9)  # pyrefly: ignore[bad-argument-type]
    for length in (0, "9"):
        with pytest.raises(ValueError, match=f"expected length to be a whole number above 0, got {length!r}"):
            SequenceSumNorm(length)  # pyrefly: ignore[bad-argument-type]


def test_a_prompt_counts_even_if_none_of_its_trained_rows_has_a_token() -> None:
    valid = torch.tensor([[True, True], [False, False], [False, False]])
    found = prompt_mean(valid, torch.tensor([True, True, False]), torch.tensor([0, 1, 2]))
    assert found.tolist() == [[0.25, 0.25], [0.0, 0.0], [0.0, 0.0]]
