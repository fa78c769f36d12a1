"""PositiveNLL: the mean over the tokens of right responses, however the rollout is cut into steps."""

from typing import Any

import pytest
import torch
from kit.support import differing, fit, rollout_of, run_step, tiny_module, view_of_rollout
from lightning.pytorch import Trainer

from lightning_rl import LossView, Reinforce, Rollout
from lightning_rl.callbacks import PositiveNLL
from lightning_rl.corrections import Corrections
from lightning_rl.signal.reductions import sequence_mean
from lightning_rl.testing import check_callback


def samples(**given: Any) -> Rollout:
    """Right responses of 3 tokens and 1 token, a wrong one of 2, and a right one without reward."""
    masks = [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]
    rollout = rollout_of([1.0, 0.0, 0.5, 1.0], masks, rewarded=torch.tensor([True, True, True, False]), **given)
    nothing = torch.zeros(4, 3)
    return rollout.replace(old_logprobs=nothing, advantages=nothing)


def seen(correction: PositiveNLL, rollout: Rollout) -> LossView:
    rollout = Corrections([correction]).provide(rollout)
    leaf = torch.tensor([[-1.0, -2.0, -3.0], [-5.0, -5.0, 0.0], [-4.0, 0.0, 0.0], [-7.0, -7.0, -7.0]]).requires_grad_()
    return view_of_rollout(rollout, leaf)


def test_the_mean_runs_over_the_valid_tokens_of_right_responses() -> None:
    correction = PositiveNLL(0.1)
    step = run_step(seen(correction, samples()), callbacks=[correction], loss=Reinforce())
    assert step.metrics["positive_nll/loss"] == pytest.approx((1 + 2 + 3 + 4) / 4)
    assert float(step.loss) == pytest.approx(0.1 * 2.5)
    share = -0.1 / 4
    expected = torch.tensor([[share] * 3, [0.0] * 3, [share, 0.0, 0.0], [0.0] * 3])
    torch.testing.assert_close(step.gradient, expected)


def test_the_modules_reduction_plays_no_part() -> None:
    correction = PositiveNLL(0.1)
    step = run_step(seen(correction, samples()), callbacks=[correction], loss=Reinforce(), reduction=sequence_mean)
    assert float(step.loss) == pytest.approx(0.25)


def test_right_is_what_earned_more_than_the_bound() -> None:
    correction = PositiveNLL(0.1, threshold=0.5)
    step = run_step(seen(correction, samples()), callbacks=[correction], loss=Reinforce())
    assert float(step.loss) == pytest.approx(0.1 * (1 + 2 + 3) / 3)
    assert correction.rollout_metrics(samples())["positive_nll/positive"].value() == pytest.approx(1 / 3)


def test_a_right_token_weighs_the_same_in_whatever_minibatch_it_lies() -> None:
    correction, whole = PositiveNLL(1.0), samples(groups=[0, 1, 2, 3])
    module = tiny_module(minibatches_per_rollout=2)
    correction.setup(Trainer(logger=False, enable_checkpointing=False), module, "fit")
    view = seen(correction, whole)
    halves = [view.select(torch.tensor(rows)) for rows in ([0, 3], [1, 2])]  # 3 of 6 tokens are right, and 1 of 3
    steps = [run_step(half, callbacks=[correction], loss=Reinforce()) for half in halves]
    assert [step.gradient.tolist() for step in steps] == [[[-0.5] * 3, [0.0] * 3], [[0.0] * 3, [-0.5, 0.0, 0.0]]]
    assert sum(float(step.loss) for step in steps) / 2 == pytest.approx(2.5)


def test_two_of_them_go_together() -> None:
    twins = [PositiveNLL(0.5), PositiveNLL(0.25, threshold=0.75).with_name("best")]
    view = view_of_rollout(Corrections(twins).provide(samples()), torch.full((4, 3), -1.0).requires_grad_())
    step = run_step(view, callbacks=twins, loss=Reinforce())
    assert step.gradient[0].tolist() == pytest.approx([-0.5 / 4 - 0.25 / 3] * 3)
    assert step.gradient[2].tolist() == pytest.approx([-0.5 / 4, 0.0, 0.0])


@pytest.mark.nightly
@pytest.mark.parametrize("threshold", [-0.5, 0.0, 0.5])
def test_the_kit_finds_its_bound_to_matter(threshold: float) -> None:
    check_callback(PositiveNLL(threshold=threshold))


def test_a_rollout_without_a_right_response_has_no_term() -> None:
    correction = PositiveNLL(0.1, threshold=9.0)
    step = run_step(seen(correction, samples()), callbacks=[correction], loss=Reinforce())
    assert step.loss == 0 and not step.gradient.any()


def test_it_trains_in_several_steps_of_a_fit() -> None:
    plain, trained = tiny_module(epochs_per_rollout=2), tiny_module(epochs_per_rollout=2)
    fit(plain, max_steps=4)
    fit(trained, callbacks=[PositiveNLL()], max_steps=4)
    assert differing(trained, plain)
