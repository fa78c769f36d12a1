"""OutlierMask: a single valid token out of bounds vetoes its row."""

import math

import pytest
from kit.support import run_step, view_of

from lightning_rl.callbacks import OutlierMask

NAN = math.nan


@pytest.mark.parametrize(
    ("old", "kept"),
    [
        pytest.param([0.0, -1.0, NAN], True, id="ordinary"),
        pytest.param([0.0, math.log(1e-5), NAN], False, id="far-too-unlikely"),
        pytest.param([0.0, math.log(200.0), NAN], False, id="far-too-likely"),
        pytest.param([math.log(1e-5), math.log(1e5), NAN], False, id="two-that-cancel"),
    ],
)
def test_one_token_vetoes_its_row(old: list[float], kept: bool) -> None:
    view = view_of([-1.0] * 3, old_logprobs=old, rollout_logprobs=[0.0] * 3, valid=[True, True, False])
    assert OutlierMask(1e-4, 100.0).sequence_mask(view).tolist() == [kept]


def test_has_no_upper_bound_by_default() -> None:
    view = view_of([-1.0], old_logprobs=[15.0], rollout_logprobs=[0.0])
    assert OutlierMask().sequence_mask(view).item()


def test_logs_the_share_of_outlying_tokens() -> None:
    view = view_of(
        [[-1.0, -1.0], [-1.0, -1.0]], old_logprobs=[[-12.0, 0.0], [0.0, 0.0]], rollout_logprobs=[[0.0] * 2] * 2
    )
    logged = run_step(view, callbacks=[OutlierMask()]).metrics
    assert logged["outlier_mask/tokens"] == 0.25 and logged["outlier_mask/rejected"] == 0.5
