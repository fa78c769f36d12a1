"""GeometricMask: the mean log-ratio of the valid tokens decides for the whole row, whatever its length."""

import math

import pytest
from kit.support import run_step, view_of

from lightning_rl import Reinforce
from lightning_rl.callbacks import GeometricMask

NAN = math.nan


@pytest.mark.parametrize(
    ("old", "kept"),
    [
        pytest.param([0.0, 0.0, NAN], True, id="on-policy"),
        pytest.param([0.3, -0.3, NAN], True, id="cancels"),
        pytest.param([0.2, 0.0, NAN], True, id="mean-0.1-within"),
        pytest.param([0.3, 0.0, NAN], False, id="mean-0.15-above"),
        pytest.param([-0.3, 0.0, NAN], False, id="mean-0.15-below"),
    ],
)
def test_keeps_rows_whose_mean_ratio_lies_within(old: list[float], kept: bool) -> None:
    view = view_of([-1.0] * 3, old_logprobs=old, rollout_logprobs=[0.0] * 3, valid=[True, True, False])
    assert GeometricMask(math.exp(-0.12), math.exp(0.12)).sequence_mask(view).tolist() == [kept]


def test_does_not_depend_on_the_length() -> None:
    short, long = (view_of([-1.0] * n, old_logprobs=[0.1] * n, rollout_logprobs=[0.0] * n) for n in (1, 50))
    mask = GeometricMask(0.9, 1.12)
    assert mask.sequence_mask(short).item() and mask.sequence_mask(long).item()


def test_a_masked_row_still_counts_in_the_denominator() -> None:
    view = view_of([[-1.0], [-1.0]], old_logprobs=[[-1.0], [0.0]], rollout_logprobs=[[-1.0], [-1.0]])
    step = run_step(view, callbacks=[GeometricMask()], loss=Reinforce())
    assert step.gradient.tolist() == [[-0.5], [0.0]]
    assert step.metrics["geometric_mask/rejected"] == 0.5
    assert step.metrics["geometric_mask/ratio_max"] == pytest.approx(math.e, rel=1e-6)


def test_refuses_bounds_that_leave_out_one() -> None:
    with pytest.raises(ValueError, match=r"expected 0 <= low <= 1 <= high, got 1\.2 and 2"):
        GeometricMask(1.2, 2)
