"""ReferenceKL: a penalty in the reward or a term of the loss, and the raw KL measured either way."""

import math
import warnings

import pytest
import torch
from kit.support import callback_of, rollout_of, run_step, view_of, view_of_rollout
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import GAE, LossView, Reinforce
from lightning_rl.callbacks import ReferenceKL
from lightning_rl.corrections import Corrections
from lightning_rl.rollouts.estimate_signal import estimate_signal
from lightning_rl.signal.kl import Clamped, k1, k3

NAN, INF = math.nan, math.inf
LOGPROBS, REF = [0.5, 0.7, 0.9], [0.4, 0.5, 0.6]


def witness(dtype: torch.dtype = torch.float64) -> LossView:
    return view_of(LOGPROBS, ref_logprobs=REF, old_logprobs=LOGPROBS, advantages=[0.0] * 3, dtype=dtype)


def test_witness_as_a_reward() -> None:
    rollout = rollout_of([1.0], [[1, 1, 1]], old_logprobs=[LOGPROBS], ref_logprobs=[REF])
    callback = ReferenceKL(0.05)
    assert_close(callback.token_reward(rollout), torch.tensor([[-0.005, -0.01, -0.015]]), atol=1e-6, rtol=0)
    found, _, stats = estimate_signal(rollout, GAE(whitened=False), Corrections([callback]))
    assert_close(found.require("advantages"), torch.tensor([[0.97, 0.975, 0.985]]), atol=1e-6, rtol=0)
    assert float(stats["kl/penalty"].value()) == pytest.approx(0.01, abs=1e-6)
    step = run_step(view_of_rollout(found, torch.tensor([LOGPROBS]).requires_grad_()), callbacks=[callback])
    assert step.metrics["kl/ref"] == step.metrics["reference_kl/estimate"] == pytest.approx(0.2, abs=1e-6)
    assert step.metrics["reference_kl/positive"] == 1.0
    assert "reference_kl/loss" not in step.metrics


def test_witness_as_a_loss() -> None:
    step = run_step(witness(), callbacks=[ReferenceKL(0.05, as_loss=True)], loss=Reinforce())
    gaps = torch.tensor([[0.1, 0.2, 0.3]], dtype=torch.float64)
    values = torch.exp(-gaps) - 1 + gaps
    assert step.metrics["reference_kl/loss"] == pytest.approx(float(values.mean()), abs=1e-6)
    assert float(step.loss) == pytest.approx(0.05 * float(values.mean()), abs=1e-6)
    assert_close(step.gradient, 0.05 * (1 - torch.exp(-gaps)) / 3, atol=1e-6, rtol=0)
    assert step.metrics["reference_kl/estimate"] == pytest.approx(float(values.mean()), abs=1e-6)
    assert step.metrics["kl/ref"] == pytest.approx(0.2, abs=1e-6)  # k1 for every estimator


@pytest.mark.parametrize(
    ("estimator", "penalty"),
    [("k1", [0.1, -0.2]), ("abs", [0.1, 0.2]), ("k2", [0.005, 0.02]), ("k3", [0.00483742, 0.02140276])],
)
def test_every_estimator_works_as_a_reward(estimator: str, penalty: list[float]) -> None:
    rollout = rollout_of([0.0], [[1, 1]], old_logprobs=[[-1.0, -1.0]], ref_logprobs=[[-1.1, -0.8]])
    found = ReferenceKL(0.5, estimator=estimator).token_reward(rollout)
    assert_close(found, -0.5 * torch.tensor([penalty]), atol=1e-6, rtol=0)
    view = view_of([-1.0, -1.0], ref_logprobs=[-1.1, -0.8])
    metrics = run_step(view, callbacks=[ReferenceKL(0.5, estimator=estimator)]).metrics
    assert metrics["reference_kl/estimate"] == pytest.approx(sum(penalty) / 2, abs=1e-6)
    assert metrics["reference_kl/positive"] == (0.5 if estimator == "k1" else 1.0)


def test_the_penalty_is_another_tensor_than_what_it_was_made_from() -> None:
    rollout = rollout_of([1.0], [[1, 1, 1]], old_logprobs=[LOGPROBS], ref_logprobs=[REF])
    before = {name: tensor.clone() for name, tensor in rollout.tensors()}
    callback = ReferenceKL(0.05)
    first, second = callback.token_reward(rollout), callback.token_reward(rollout)
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    assert all(torch.equal(tensor, before[name]) for name, tensor in rollout.tensors())


def test_masks_of_other_corrections_do_not_touch_the_loss_term() -> None:
    reject = callback_of("reject", sequence_mask=lambda view: torch.zeros_like(view.trained))
    callback = ReferenceKL(0.05, as_loss=True)
    alone, rejected = run_step(witness(), callbacks=[callback]), run_step(witness(), callbacks=[callback, reject])
    assert torch.equal(alone.gradient, rejected.gradient) and alone.gradient.abs().sum() > 0


def test_contributes_and_reads_according_to_its_form() -> None:
    reward, loss = ReferenceKL(), ReferenceKL(as_loss=True)
    assert reward.contributes == {"token_reward", "metrics"} and loss.contributes == {"loss_term", "metrics"}
    assert reward.reads == ("old_logprobs", "ref_logprobs") and loss.reads == ()
    assert reward.reads_at_loss == loss.reads_at_loss == ("ref_logprobs",)


def test_estimators_that_train_nothing_as_a_loss_warn() -> None:
    with pytest.warns(UserWarning, match="ReferenceKL with k1 as a loss: its expected gradient is zero"):
        ReferenceKL(estimator="k1", as_loss=True)
    with pytest.warns(UserWarning, match="ReferenceKL with abs as a loss"):
        ReferenceKL(estimator="abs", as_loss=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for estimator in ("k1", "abs", "k2", "k3", None):
            ReferenceKL(estimator=estimator)
        for estimator in ("k2", "k3", None):
            ReferenceKL(estimator=estimator, as_loss=True)


def test_an_estimator_may_be_an_object_or_a_function() -> None:
    view = view_of([-1.0, -2.0], ref_logprobs=[-1.5, -5.0])
    clamped = run_step(view, callbacks=[ReferenceKL(estimator=Clamped(k3, value=1.0), as_loss=True)])
    assert clamped.metrics["reference_kl/loss"] == pytest.approx((math.exp(-0.5) - 0.5 + 1) / 2)
    plain = run_step(view, callbacks=[ReferenceKL(estimator=lambda new, other: (new - other) ** 4, as_loss=True)])
    assert plain.metrics["reference_kl/loss"] == pytest.approx((0.5**4 + 3**4) / 2)
    with pytest.warns(UserWarning, match="ReferenceKL with k1 as a loss"):
        ReferenceKL(estimator=k1, as_loss=True)


def test_a_token_that_agrees_with_the_reference_is_not_counted_as_positive() -> None:
    step = run_step(view_of([-1.0, -1.0], ref_logprobs=[-1.0, -2.0]), callbacks=[ReferenceKL(0.1)])
    assert step.metrics["reference_kl/positive"] == 0.5


def test_witness_unbiased() -> None:
    old = [0.4, 0.7, 1.0]
    view = view_of(LOGPROBS, ref_logprobs=REF, old_logprobs=old, advantages=[0.0] * 3, dtype=torch.float64)
    step = run_step(view, callbacks=[ReferenceKL(0.05, as_loss=True, unbiased=True)], loss=Reinforce())
    gaps = torch.tensor([[0.1, 0.2, 0.3]], dtype=torch.float64)
    ratio, values = torch.exp(torch.tensor([[0.1, 0.0, -0.1]], dtype=torch.float64)), torch.exp(-gaps) - 1 + gaps
    assert step.metrics["reference_kl/loss"] == pytest.approx(float((ratio * values).mean()), abs=1e-9)
    assert step.metrics["reference_kl/estimate"] == pytest.approx(float(values.mean()), abs=1e-9), "raw"
    assert_close(step.gradient, 0.05 * ratio * (values + 1 - torch.exp(-gaps)) / 3, atol=1e-9, rtol=0)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_its_expected_gradient_is_that_of_the_reverse_kl(estimator: str) -> None:
    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    old, ref = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]], dtype=torch.float64).log()
    current = logits.log_softmax(0)
    expected = gradient((current.exp() * (current - ref)).sum())
    view = view_of(current, old_logprobs=old, ref_logprobs=ref, dtype=torch.float64).replace(logprobs=current[None])
    term = ReferenceKL(as_loss=True, unbiased=True, estimator=estimator).loss_term(view).per_token[0]
    assert_close(gradient((old.exp() * term).sum()), expected)
    plain = k1(current, ref) if estimator == "k1" else k3(current, ref)
    assert not torch.allclose(gradient((old.exp() * plain).sum()), expected)


def test_unbiased_is_for_losses_and_k1_then_trains_something() -> None:
    with pytest.warns(UserWarning, match="ReferenceKL with abs as a loss"):
        ReferenceKL(estimator="abs", as_loss=True, unbiased=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback = ReferenceKL(estimator="k1", as_loss=True, unbiased=True)
    step = run_step(witness(), callbacks=[callback], loss=Reinforce())
    assert_close(step.gradient, 0.05 * (torch.tensor([[0.1, 0.2, 0.3]], dtype=torch.float64) + 1) / 3)
    assert callback.reads == () and callback.reads_at_loss == ("old_logprobs", "ref_logprobs")
