"""Numbers worked by hand, or by the systems that the losses come from: per-token losses, sums, gradients."""

import math
from typing import Any

import pytest
import torch
from kit.support import StepResult, run_step, view_of
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GSPO,
    SAPO,
    VESPO,
    ClippedSurrogate,
    PolicyLoss,
    Reinforce,
    SequenceSumNorm,
    ValueLoss,
    presets,
)
from lightning_rl.callbacks import TruncatedIS

INF = math.inf


def summed(valid_tokens: Tensor, *_: Any) -> Tensor:
    """Every valid token weighs 1."""
    return valid_tokens.double()


def step_of(loss: PolicyLoss, view: Any) -> StepResult:
    return run_step(view, loss=loss, reduction=summed)


def one_row(logprobs: list[float], advantages: list[float], **given: Any) -> Any:
    return view_of(logprobs, advantages=advantages, dtype=torch.float64, **given)


def peers_view() -> Any:
    """The batch on which SkyRL's functions were run; the last token of the second row is masked."""
    return view_of(
        [[-0.2, -1.5, -0.7, -3.0], [-0.9, -0.1, -2.2, -0.4]],
        old_logprobs=[[-0.5, -1.0, -0.7, -1.0], [-1.2, -0.1, -2.0, -0.4]],
        rollout_logprobs=[[-0.6, -1.1, -0.5, -1.2], [-1.1, -0.3, -2.5, 0.0]],
        advantages=[[1.0] * 4, [-0.5] * 4],
        valid=[[1, 1, 1, 1], [1, 1, 1, 0]],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("anchor", ["old", "rollout"])
def test_cispo_keeps_every_gradient_under_a_clipped_weight(anchor: Any) -> None:
    given: dict[str, Any] = {f"{anchor}_logprobs": [-0.5, -0.2, -0.9, -0.3]}
    view = one_row([-0.1, -0.4, -0.3, -0.8], [2.0, -1.0, 0.5, 1.5], **given)
    loss = CISPO(clip_low=0.2, clip_high=0.2, anchor=anchor)
    expected = torch.tensor([[0.24, -0.32749, 0.18, 0.96]], dtype=torch.float64)
    assert_close(loss(view).detach(), expected, atol=1e-5, rtol=0)
    slope = torch.tensor([[-2.4, 0.81873, -0.6, -1.2]], dtype=torch.float64)
    assert_close(step_of(loss, view).gradient, slope, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("loss", "total", "gradient"),
    [
        pytest.param(ClippedSurrogate(), -1.35757, [0, -0.60653, -1, -0.13534, 0.67493, 0.5, 0.40937, 0], id="ppo"),
        pytest.param(GSPO(), -0.75696, [-0.57695] * 4 + [0.51695] * 3 + [0], id="gspo"),
        pytest.param(GSPO(per_token=True), -0.75696, [-0.57695] * 4 + [0.51695] * 3 + [0], id="gspo-per-token"),
        pytest.param(CISPO(), 0.72773, [-1.34986, None, -1, None, None, None, None, 0], id="cispo-old"),
        pytest.param(CISPO(anchor="rollout"), 0.27731, [-math.exp(0.4)] + [None] * 6 + [0], id="cispo-rollout"),
        pytest.param(DPPO(), 0.24198, [0, -0.67032, -0.81873, -0.16530, 0.61070, 0.61070, 0.67493, 0], id="dppo"),
        pytest.param(SAPO(), -4.20356, [None] * 7 + [0], id="sapo"),
        pytest.param(Reinforce(), 3.8, [-1, -1, -1, -1, 0.5, 0.5, 0.5, 0], id="reinforce"),
    ],
)
def test_sums_and_gradients_of_a_peer(loss: PolicyLoss, total: float, gradient: list[float | None]) -> None:
    step = step_of(loss, peers_view())
    assert float(step.loss) == pytest.approx(total, abs=2e-5)
    for found, expected in zip(step.gradient.flatten().tolist(), gradient, strict=True):
        assert expected is None or found == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    ("advantage", "gap", "tau", "loss", "slope"),
    [
        (1.0, 0.0, 1.0, -2.0, -1.0),
        (-1.0, 0.0, 1.05, 2 / 1.05, 1.0),
        (0.0, 0.0, 1.05, 0.0, 0.0),
        (2.0, math.log(2.0), 1.0, -8 / (1 + math.exp(-1)), -8 * math.exp(-1) / (1 + math.exp(-1)) ** 2 * 2),
    ],
)
def test_sapo_by_hand(advantage: float, gap: float, tau: float, loss: float, slope: float) -> None:
    view = one_row([-1.0 + gap], [advantage], old_logprobs=[-1.0])
    for built in (SAPO(), SAPO(tau_positive=tau) if advantage > 0 else SAPO(tau_negative=tau)):
        step = step_of(built, view)
        assert (float(step.loss), step.gradient.item()) == pytest.approx((loss, slope))


@pytest.mark.parametrize(
    ("then", "now", "advantage", "left_out"),
    [
        pytest.param(0.5, 0.75, 1.0, True, id="grown-and-good"),
        pytest.param(0.5, 0.75, -1.0, False, id="grown-and-bad"),
        pytest.param(0.5, 0.25, -1.0, True, id="shrunk-and-bad"),
        pytest.param(0.5, 0.25, 0.0, True, id="shrunk-and-neutral"),
        pytest.param(0.5, 0.25, 1.0, False, id="shrunk-and-good"),
        pytest.param(0.5, 0.65, 1.0, False, id="within"),
        pytest.param(0.01, 0.1, 1.0, False, id="a-tenfold-ratio-of-a-rare-token-is-near"),
    ],
)
def test_dppo_leaves_out_what_left_the_region(then: float, now: float, advantage: float, *, left_out: bool) -> None:
    view = one_row([math.log(now)], [advantage], rollout_logprobs=[math.log(then)])
    step = step_of(DPPO(), view)
    expected = 0.0 if left_out else -now / then * advantage
    assert (float(step.loss), step.gradient.item()) == pytest.approx((expected, expected))
    assert step.metrics["policy/outside"] == float(left_out)


@pytest.mark.parametrize(("high", "left_out"), [(0.08, True), (0.1, False)])
def test_dppo_with_the_binary_kl(high: float, *, left_out: bool) -> None:
    divergence = 0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3)  # of then = 0.5 to now = 0.7: 0.0872
    assert 0.08 < divergence < 0.1
    view = one_row([math.log(0.7)], [1.0], rollout_logprobs=[math.log(0.5)])
    assert (step_of(DPPO(divergence="kl", high=high), view).loss == 0) == left_out


def test_dppo_with_a_cap_is_the_score_function_form() -> None:
    view = one_row([-1.0, -1.0], [1.0, 1.0], rollout_logprobs=[-1.1, -1.6])
    step = step_of(DPPO(cap=1.5, high=1.0), view)
    assert_close(step.gradient, torch.tensor([[-math.exp(0.1), -1.5]], dtype=torch.float64))
    assert float(step.loss) == pytest.approx(math.exp(0.1) + 1.5)  # -w A logp with logp = -1
    free = step_of(DPPO(high=1.0), view)
    assert free.gradient[0, 0] == pytest.approx(float(step.gradient[0, 0])) and free.loss < 0


@pytest.mark.parametrize(
    ("gaps", "advantage", "value", "gradient"),
    [
        pytest.param([0.5, -0.1], 1.0, -math.exp(0.15), [0.0, -math.exp(0.15)], id="good-is-clipped-above"),
        pytest.param([-0.5, 0.1], 1.0, -math.exp(-0.2), [-math.exp(-0.2)] * 2, id="good-is-not-clipped-below"),
        pytest.param([0.5, -0.1], -1.0, math.exp(0.2), [math.exp(0.2)] * 2, id="bad-is-not-clipped-above"),
        pytest.param([-0.5, 0.1], -1.0, math.exp(-0.15), [0.0, math.exp(-0.15)], id="bad-is-clipped-below"),
        pytest.param([0.0, 0.0], 2.0, -2.0, [-2.0, -2.0], id="on-policy"),
    ],
)
def test_gmpo_by_hand(gaps: list[float], advantage: float, value: float, gradient: list[float]) -> None:
    old = [-1.0, -2.0]
    view = one_row([a + b for a, b in zip(old, gaps, strict=True)], [advantage] * 2, old_logprobs=old)
    assert GMPO()(view).detach()[0].tolist() == pytest.approx([value] * 2)
    assert step_of(GMPO(), view).gradient[0].tolist() == pytest.approx(gradient)  # of the sum over two tokens


def test_gmpo_has_a_bound_of_its_own_on_either_side() -> None:
    loss = GMPO(clip_low=0.2, clip_high=0.3)
    good = one_row([-0.5, -0.7], [1.0, 1.0], old_logprobs=[-1.0, -1.0])  # log-ratios .5 and .3
    bad = one_row([-1.5, -1.1], [-1.0, -1.0], old_logprobs=[-1.0, -1.0])  # log-ratios -.5 and -.1
    assert loss(good).detach()[0].tolist() == pytest.approx([-math.exp(0.3)] * 2)
    assert loss(bad).detach()[0].tolist() == pytest.approx([math.exp(-0.15)] * 2)


def test_gmpo_takes_a_geometric_weight_into_its_mean() -> None:
    view = one_row([-0.9, -1.1], [1.0, 1.0], old_logprobs=[-1.0, -1.0], rollout_logprobs=[-1.4, -1.0])
    step = run_step(view, callbacks=[TruncatedIS("geometric")], loss=GMPO())
    assert float(step.loss) == pytest.approx(-math.exp(0.0 + 0.4 / 2))  # the mean of .1 + .4 and -.1 + 0


@pytest.mark.parametrize(
    ("gaps", "advantage", "weight"),
    [
        pytest.param([0.0, 0.0], 1.0, 1.0, id="on-policy"),
        pytest.param([math.log(2), 0.0], 1.0, 4 * math.exp(-3), id="good-fades-above"),
        pytest.param([math.log(2), 0.0], 0.0, 4 * math.exp(-3), id="none-counts-as-good"),
        pytest.param([math.log(4), -math.log(2)], -1.0, 8 * math.exp(-2), id="bad-by-the-product"),
        pytest.param([-math.log(2), 0.0], -1.0, math.exp(1) / 8, id="bad-fades-below"),
        pytest.param([300.0, 300.0], 1.0, 0.0, id="far-above"),
        pytest.param([-300.0, -300.0], -1.0, 0.0, id="far-below"),
    ],
)
def test_vespo_by_hand(gaps: list[float], advantage: float, weight: float) -> None:
    logprobs = [-1.0, -2.0]
    old = [now - gap for now, gap in zip(logprobs, gaps, strict=True)]
    view = one_row(logprobs, [advantage] * 2, rollout_logprobs=old)
    assert VESPO().weights(view)[0].tolist() == pytest.approx([weight] * 2)
    step = step_of(VESPO(), view)
    assert float(step.loss) == pytest.approx(weight * advantage * 3)
    assert step.gradient[0].tolist() == pytest.approx([-weight * advantage] * 2)
    assert step.metrics["policy/weight_max"] == pytest.approx(weight)


def test_vespo_chooses_its_kernel_by_the_advantage_of_each_token_and_may_stand_on_old() -> None:
    view = one_row([-1.0, -1.0], [1.0, -1.0], old_logprobs=[-1.0 - math.log(2), -1.0])
    shape = {"k_positive": 1.0, "lambda_positive": 1.0, "k_negative": 0.0, "lambda_negative": 2.0}
    weights = VESPO(anchor="old", **shape).weights(view)
    assert weights[0].tolist() == pytest.approx([2 * math.exp(-1), math.exp(-2)])


@pytest.mark.parametrize("loss", [VESPO(), DRO(), presets.vespo().options["loss"]], ids=["vespo", "dro", "preset"])
def test_stale_rollouts_change_the_only_step(loss: Any) -> None:
    """With one optimizer step for a rollout the current policy is the one before the update."""
    fresh, stale = (
        one_row([-1.0, -2.0], [1.0, 1.0], old_logprobs=[-1.0, -2.0], rollout_logprobs=sampled)
        for sampled in ([-1.0, -2.0], [-1.5, -2.5])
    )
    plain = step_of(Reinforce(), fresh).gradient
    torch.testing.assert_close(step_of(loss, fresh).gradient, plain)
    assert (step_of(loss, stale).gradient - plain).abs().min() > 0.01


@pytest.mark.parametrize("anchor", ["old", "rollout"])
def test_dro_is_the_policy_gradient_on_a_quadratic_leash(anchor: Any) -> None:
    given: dict[str, Any] = {f"{anchor}_logprobs": [-1.5, -2.0]}
    step = step_of(DRO(beta=0.2, anchor=anchor), one_row([-1.0, -2.0], [2.0, -1.0], **given))
    assert float(step.loss) == pytest.approx(2.0 + 0.2 * 0.125 - 2.0)
    assert step.gradient[0].tolist() == pytest.approx([-2.0 + 0.2 * 0.5, 1.0])


def test_gspo_may_stand_on_the_rollout_and_bound_bad_responses_twice() -> None:
    given = {"rollout_logprobs": [-1.1, -2.3], "old_logprobs": [-1.0, -2.0]}
    good, bad = (one_row([-1.0, -2.0], [advantage] * 2, **given) for advantage in (1.0, -1.0))
    wide: dict[str, Any] = {"clip_low": 1.0, "clip_high": 1.0, "anchor": "rollout"}
    ratio = math.exp(0.2)
    assert step_of(GSPO(**wide), good).gradient[0].tolist() == pytest.approx([-ratio] * 2)
    capped = step_of(GSPO(**wide, dual_clip=1.1), bad)
    assert float(capped.loss) == pytest.approx(2 * 1.1) and not capped.gradient.any()
    assert step_of(GSPO(**wide, dual_clip=1.3), bad).gradient[0].tolist() == pytest.approx([ratio] * 2)


def test_luspo_weighs_a_response_as_many_times_as_it_has_tokens() -> None:
    view = view_of(
        [[-1.0, -2.0, -1.0], [-1.0, 0.0, 0.0]],
        old_logprobs=[[-1.1, -2.2, -1.3], [-1.5, 0.0, 0.0]],
        advantages=[[1.0] * 3, [-2.0] * 3],
        valid=[[1, 1, 1], [1, 0, 0]],
        dtype=torch.float64,
    )
    step = run_step(view, loss=GSPO(clip_low=1.0, clip_high=1.0), reduction=SequenceSumNorm(1))
    assert float(step.loss) == pytest.approx((3 * -math.exp(0.2) + 1 * 2 * math.exp(0.5)) / 2)


def test_gmpo_takes_the_mean_advantage_and_the_sign_of_each_token() -> None:
    view = one_row([-0.5, -1.5], [3.0, -1.0], old_logprobs=[-1.0, -1.0])  # log-ratios .5 and -.5, clipped to .4, -.4
    assert GMPO()(view).detach()[0].tolist() == pytest.approx([-1.0, -1.0])
    assert not step_of(GMPO(), view).gradient.any()


@pytest.mark.parametrize(
    ("error", "loss", "slope"), [(0.3, 0.045, 0.3), (0.5, 0.125, 0.5), (2.0, 0.875, 0.5), (-2.0, 0.875, -0.5)]
)
def test_the_value_loss_grows_linearly_beyond_the_huber_bound(error: float, loss: float, slope: float) -> None:
    values = torch.tensor([[1.0 + error]], dtype=torch.float64, requires_grad=True)
    old, returns = torch.zeros(2, 1, 1, dtype=torch.float64).add(1.0).unbind()
    found = ValueLoss(clip=None, huber=0.5)(values, old, returns)
    assert found.item() == pytest.approx(loss)
    assert torch.autograd.grad(found.sum(), values)[0].item() == pytest.approx(slope)


def test_the_huber_bound_applies_to_the_clipped_value_as_well() -> None:
    values, old, returns = (torch.tensor([[number]], dtype=torch.float64) for number in (3.0, 0.0, 4.0))
    clipped = ValueLoss(clip=0.5, huber=1.0)(values, old, returns)  # the clipped value is .5, its error 3.5
    assert clipped.item() == pytest.approx(1.0 * (3.5 - 0.5))
    assert ValueLoss(clip=None, huber=1.0)(values, old, returns).item() == pytest.approx(0.5)
