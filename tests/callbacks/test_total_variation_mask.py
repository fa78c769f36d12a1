"""TotalVariationMask: beyond a mean of |r - 1| only tokens that close the gap go on training."""

import math
from typing import Any

import pytest
import torch
from kit.support import run_step, view_of

from lightning_rl import LossView, Reinforce
from lightning_rl.callbacks import TotalVariationMask

NAN = math.nan


def row(ratios: list[float], advantages: list[float], **given: Any) -> LossView:
    """A row with these ratios of old to rollout policy."""
    old = [math.log(ratio) - 1 for ratio in ratios]
    rollout = [-1.0] * len(ratios)
    given = {"old_logprobs": old, "rollout_logprobs": rollout, "advantages": advantages, **given}
    return view_of([-1.0] * len(ratios), dtype=torch.float64, **given)


@pytest.mark.parametrize(
    ("bound", "kept"),
    [
        pytest.param(0.3, [True, True, True, True], id="within"),  # the mean of .5, .5, .2 and 0 is .3
        pytest.param(0.29, [False, True, False, True], id="beyond"),
    ],
)
def test_beyond_the_bound_only_what_narrows_the_gap_is_kept(bound: float, kept: list[bool]) -> None:
    view = row([1.5, 0.5, 0.8, 1.0], [1.0, 1.0, -1.0, 5.0])
    assert TotalVariationMask(bound + 1e-12).token_mask(view).tolist() == [kept]


def test_a_masked_token_counts_neither_in_the_mean_nor_in_its_length() -> None:
    view = row([1.5, 1.1, 9.0], [1.0, 1.0, 1.0], valid=[1, 1, 0])
    assert TotalVariationMask(0.31).token_mask(view)[0, :2].tolist() == [True, True]  # .6 / 2, not .6 / 3 or 8.6 / 3
    assert TotalVariationMask(0.29).token_mask(view)[0, :2].tolist() == [False, False]
    assert TotalVariationMask(0.0).metrics(view)["total_variation_mask/distance"].value() == pytest.approx(0.3)


def test_the_current_policy_may_stand_above_the_ratio() -> None:
    logprobs = [math.log(2.0) - 1]
    view = view_of(logprobs, old_logprobs=[-1.0], rollout_logprobs=[-1.0], advantages=[1.0], dtype=torch.float64)
    old, current = TotalVariationMask(0.5), TotalVariationMask(0.5, policy="current")
    assert old.token_mask(view).item() and not current.token_mask(view).item()
    assert current.reads_at_loss == ("rollout_logprobs",)


def test_what_is_left_out_counts_in_the_denominator() -> None:
    step = run_step(row([2.0, 0.5], [1.0, 1.0]), callbacks=[TotalVariationMask(0.1)], loss=Reinforce())
    assert step.gradient.tolist() == [[0.0, -0.5]]
    assert step.metrics["total_variation_mask/rejected_tokens"] == 0.5
    assert step.metrics["total_variation_mask/distance_max"] == pytest.approx(0.75)
