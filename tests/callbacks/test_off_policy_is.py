"""OffPolicyIS: each token weighed by how much likelier the policy being trained makes it."""

import math
from typing import Any

import pytest
import torch
from kit.support import run_step, view_of
from torch.testing import assert_close

from lightning_rl import LossView, Reinforce, SequenceSumNorm
from lightning_rl.callbacks import OffPolicyIS

NAN, INF = math.nan, math.inf
LOGPROBS, ROLLOUT, ADVANTAGES = [-0.1, -0.4, -0.3, -0.8], [-0.5, -0.2, -0.9, -0.3], [2.0, -1.0, 0.5, 1.5]
WEIGHTS = [1.2, 0.8187308, 1.2, 0.8]
LOSSES = [0.24, -0.3274923, 0.18, 0.96]
GRADIENT = [-2.4, 0.8187308, -0.6, -1.2]


def column(values: list[float]) -> list[list[float]]:
    return [[value] for value in values]


def witness(**options: Any) -> LossView:
    return view_of(LOGPROBS, rollout_logprobs=ROLLOUT, advantages=ADVANTAGES, **options)


def test_witness() -> None:
    callback = OffPolicyIS(0.8, 1.2)
    step = run_step(witness(), callbacks=[callback], loss=Reinforce(), reduction=SequenceSumNorm(1))
    assert_close(callback.token_weight(witness()), torch.tensor([WEIGHTS]), atol=1e-6, rtol=0)
    assert float(step.loss) == pytest.approx(sum(LOSSES), abs=1e-6)
    assert_close(step.gradient, torch.tensor([GRADIENT]), atol=1e-6, rtol=0)


def test_logs_the_raw_ratio_and_what_the_bounds_did_to_it() -> None:
    metrics = run_step(witness(), callbacks=[OffPolicyIS(0.8, 1.2)], loss=Reinforce()).metrics
    ratios = torch.tensor([1.4918247, 0.8187308, 1.8221188, 0.6065307])
    assert metrics["off_policy_is/ratio"] == pytest.approx(float(ratios.mean()), abs=1e-6)
    assert metrics["off_policy_is/ratio_max"] == pytest.approx(1.8221188, abs=1e-6)
    assert metrics["off_policy_is/clipped"] == 0.75
    weights = torch.tensor(WEIGHTS)
    assert metrics["off_policy_is/weight_mean"] == pytest.approx(float(weights.mean()), abs=1e-6)
    assert metrics["off_policy_is/ess"] == pytest.approx(
        float(weights.sum() ** 2 / weights.square().sum() / 4), abs=1e-6
    )


@pytest.mark.parametrize(
    ("ratios", "bounds", "weights", "clipped"),
    [
        pytest.param([2.0, 0.5, 1.0], (0.8, 2.5), [2.0, 0.8, 1.0], 1 / 3, id="lower-bound"),
        pytest.param([10.0, 0.01], (0.0, 5.0), [5.0, 0.01], 1 / 2, id="single-sided"),
        pytest.param([1.0, 1.0], (1.0, 1.0), [1.0, 1.0], 0.0, id="exactly-both-bounds"),
        pytest.param([3.0, 1.0], (), [2.0, 1.0], 1 / 2, id="defaults"),
        pytest.param([1e-6, 1.0], (), [1e-6, 1.0], 0.0, id="defaults-have-no-lower-bound"),
    ],
)
def test_weights_and_the_fraction_clipped(
    ratios: list[float], bounds: tuple[float, ...], weights: list[float], clipped: float
) -> None:
    logprobs = [math.log(ratio) - 20 for ratio in ratios]
    view = view_of(logprobs, rollout_logprobs=[-20.0] * len(ratios), dtype=torch.float64)
    callback = OffPolicyIS(*bounds)
    assert_close(callback.token_weight(view), torch.tensor([weights], dtype=torch.float64))
    assert run_step(view, callbacks=[callback]).metrics["off_policy_is/clipped"] == pytest.approx(clipped)


def test_the_gradient_flows_only_through_the_loss() -> None:
    assert not OffPolicyIS().token_weight(witness()).requires_grad
    step = run_step(witness(), callbacks=[OffPolicyIS(0.0, 9.0)], loss=Reinforce(), reduction=SequenceSumNorm(1))
    ratios = torch.tensor([LOGPROBS]).sub(torch.tensor([ROLLOUT])).exp()
    assert_close(step.gradient, -ratios * torch.tensor([ADVANTAGES]))  # not -ratio * A * (1 + logp)


def test_the_denominator_does_not_change() -> None:
    view = view_of(column(LOGPROBS), rollout_logprobs=column(ROLLOUT), advantages=column(ADVANTAGES))
    step = run_step(view, callbacks=[OffPolicyIS(0.8, 1.2)], loss=Reinforce())
    assert_close(step.gradient.flatten(), torch.tensor(GRADIENT) / 4, atol=1e-6, rtol=0)


def test_carries_the_ratio_that_it_claims() -> None:
    assert OffPolicyIS.ratio == ("current", "rollout")
    assert OffPolicyIS.reads_at_loss == ("rollout_logprobs",)
