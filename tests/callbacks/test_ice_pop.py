"""IcePop: tokens outside the band leave the policy loss, the bounds are inside, the denominator stays."""

import math

import pytest
import torch
from kit.support import run_step, view_of

from lightning_rl import Reinforce
from lightning_rl.callbacks import IcePop


def test_keeps_the_band_with_its_bounds() -> None:
    old = [math.log(ratio) for ratio in (0.49, 0.5, 1.0, 4.0, 4.01)]
    view = view_of([-1.0] * 5, old_logprobs=old, rollout_logprobs=[0.0] * 5, dtype=torch.float64)
    assert IcePop(0.5, 4.0).token_mask(view).tolist() == [[False, True, True, True, False]]


def test_a_masked_token_still_counts_in_the_denominator() -> None:
    view = view_of([-1.0, -1.0], old_logprobs=[-1.0, 2.0], rollout_logprobs=[-1.0, -1.0])
    step = run_step(view, callbacks=[IcePop()], loss=Reinforce())
    assert step.gradient.tolist() == [[-0.5, 0.0]]
    assert step.metrics["ice_pop/rejected_tokens"] == 0.5


def test_logs_the_ratio_before_the_mask() -> None:
    view = view_of([-1.0, -1.0], old_logprobs=[math.log(3.0), 0.0], rollout_logprobs=[0.0, 0.0])
    logged = run_step(view, callbacks=[IcePop(0.5, 2.0)]).metrics
    assert logged["ice_pop/ratio"] == pytest.approx(2.0, rel=1e-6)
    assert logged["ice_pop/ratio_max"] == pytest.approx(3.0, rel=1e-6)
