"""ProductMask: the summed log-ratio of the valid tokens decides for the whole row, and grows with its length."""

import math

import pytest
from kit.support import run_step, view_of

from lightning_rl.callbacks import ProductMask

NAN = math.nan


@pytest.mark.parametrize(
    ("old", "kept"),
    [
        pytest.param([0.3, 0.3, NAN], True, id="within"),
        pytest.param([0.4, 0.3, NAN], False, id="above-2"),
        pytest.param([-0.4, -0.3, NAN], False, id="below-half"),
        pytest.param([5.0, -5.0, NAN], True, id="cancels"),
    ],
)
def test_keeps_rows_whose_product_lies_within(old: list[float], kept: bool) -> None:
    view = view_of([-1.0] * 3, old_logprobs=old, rollout_logprobs=[0.0] * 3, valid=[True, True, False])
    assert ProductMask().sequence_mask(view).tolist() == [kept]


def test_a_long_row_drifts_out() -> None:
    short, long = (view_of([-1.0] * n, old_logprobs=[0.1] * n, rollout_logprobs=[0.0] * n) for n in (1, 50))
    assert ProductMask().sequence_mask(short).item() and not ProductMask().sequence_mask(long).item()


def test_logs_the_product_before_the_mask() -> None:
    view = view_of([-1.0, -1.0], old_logprobs=[1.0, 1.0], rollout_logprobs=[0.0, 0.0])
    logged = run_step(view, callbacks=[ProductMask()]).metrics
    assert logged["product_mask/ratio"] == pytest.approx(math.exp(2), rel=1e-6)
    assert logged["product_mask/rejected"] == 1.0
