"""PositiveNLL: the mean over the tokens of right responses, however the rollout is cut into steps."""

import math
from typing import Any

import pytest
import torch
from kit.support import fit, rollout_of, run_step, tiny_module, view_of_rollout

from lightning_rl import LossView, Reinforce, Rollout
from lightning_rl.callbacks import PositiveNLL
from lightning_rl.corrections import Corrections
from lightning_rl.signal.reductions import sequence_mean


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


def test_steps_of_one_size_add_up_to_the_mean_of_the_rollout() -> None:
    correction, whole = PositiveNLL(1.0), samples(groups=[0, 1, 2, 3])
    view = seen(correction, whole)
    halves = [view.select(torch.tensor(rows)) for rows in ([0, 2], [1, 3])]
    tokens = [int(half.valid_tokens.sum()) for half in halves]
    losses = [float(run_step(half, callbacks=[correction], loss=Reinforce()).loss) for half in halves]
    assert losses[1] == 0.0
    assert sum(n * loss for n, loss in zip(tokens, losses, strict=True)) / sum(tokens) == pytest.approx(2.5)


def test_a_rollout_without_a_right_response_has_no_term() -> None:
    correction = PositiveNLL(0.1, threshold=9.0)
    step = run_step(seen(correction, samples()), callbacks=[correction], loss=Reinforce())
    assert step.loss == 0 and not step.gradient.any()


def test_it_goes_with_several_steps_in_a_fit() -> None:
    assert fit(tiny_module(epochs=2), callbacks=[PositiveNLL()]).global_step == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coef": -0.1}, "expected coef >= 0, got -0.1"),
        ({"threshold": math.nan}, "expected threshold to be a number, got nan"),
    ],
)
def test_refuses_options_out_of_range(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PositiveNLL(**options)
