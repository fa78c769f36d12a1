"""Shaped rewards: where the scalar of a row lands, and that nothing is lost or counted twice."""

import math

import pytest
import torch
from torch.testing import assert_close

from lightning_rl.signal.shaped_rewards import shaped_rewards

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("score", "token_rewards", "valid", "shaped"),
    [
        pytest.param(1.0, [0.1, 0.2], [1, 1], [0.1, 1.2], id="last-token"),
        pytest.param(1.0, None, [1, 1], [0.0, 1.0], id="no-token-rewards"),
        pytest.param(1.0, [0.1, 0.2, 9.0], [1, 1, 0], [0.1, 1.2, 0.0], id="padding"),
        pytest.param(1.0, [0.1, 9.0, 0.2, 9.0], [1, 0, 1, 0], [0.1, 0, 1.2, 0], id="hole-and-trailing-tool-token"),
        pytest.param(1.0, [NAN, 0.2, INF], [0, 1, 0], [0, 1.2, 0], id="poison-at-masked-tokens"),
        pytest.param(1.0, [NAN, NAN], [0, 0], [0.0, 0.0], id="no-valid-token"),
        pytest.param(NAN, [0.1, 0.2], [0, 0], [0.0, 0.0], id="broken-score-without-tokens"),
        pytest.param(-2.0, [0.1], [1], [-1.9], id="single-token"),
        pytest.param(1.0, [], [], [], id="no-tokens-at-all"),
        pytest.param(1.0, [-0.005, -0.01, -0.015], [1, 1, 1], [-0.005, -0.01, 0.985], id="raw-kl-witness"),
    ],
)
def test_the_scalar_lands_on_the_last_valid_token(
    score: float, token_rewards: list[float] | None, valid: list[int], shaped: list[float]
) -> None:
    tokens = None if token_rewards is None else torch.tensor([token_rewards])
    found = shaped_rewards(torch.tensor([score]), tokens, torch.tensor([valid], dtype=torch.bool))
    assert_close(found, torch.tensor([shaped]), atol=1e-7, rtol=0)
