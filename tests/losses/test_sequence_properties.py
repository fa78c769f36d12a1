"""GSPO in both forms, and GMPO: one ratio per response, independent of length, holes and other rows."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from kit.support import run_step, view_of
from properties.batches import some, views
from properties.evaluation import agree, evaluate
from properties.exports import REDUCTION_EXAMPLES
from torch.testing import assert_close

from lightning_rl import GMPO, GSPO, LossView
from lightning_rl.callbacks import TruncatedIS
from lightning_rl.signal.masked import row_mean
from lightning_rl.signal.reductions import Reduction

each_reduction = pytest.mark.parametrize("reduction", REDUCTION_EXAMPLES.values(), ids=REDUCTION_EXAMPLES)


def same_along_rows(view: LossView) -> LossView:
    per_row = row_mean(view.require("advantages"), view.valid_tokens)[:, None]
    return view.replace(advantages=torch.where(view.valid_tokens, per_row, 0.0))


@pytest.mark.nightly
@each_reduction
@pytest.mark.parametrize("clip", [3e-4, 0.1, 1.0])
@given(view=views())
@some
def test_both_forms_of_gspo_agree_if_a_row_has_one_advantage(reduction: Reduction, clip: float, view: LossView) -> None:
    view = same_along_rows(view)
    forms = [GSPO(clip_low=clip, clip_high=clip, per_token=form) for form in (False, True)]
    sequence, token = (evaluate(view, loss=loss, reduction=reduction) for loss in forms)
    agree((token.loss, token.gradients, token.metrics), (sequence.loss, sequence.gradients, sequence.metrics))


def test_they_differ_when_advantages_differ_along_a_row() -> None:
    view = view_of([-1.0, -2.0], old_logprobs=[-1.1, -2.3], advantages=[1.0, 3.0], dtype=torch.float64)
    ratio = math.exp(0.2)
    wide: dict[str, Any] = {"clip_low": 1.0, "clip_high": 1.0}
    assert run_step(view, loss=GSPO(**wide)).gradient[0].tolist() == pytest.approx([-ratio, -ratio])
    own = run_step(view, loss=GSPO(**wide, per_token=True)).gradient[0].tolist()
    assert own == pytest.approx([-ratio / 2, -3 * ratio / 2])


@pytest.mark.parametrize("loss", [GSPO(clip_low=1.0, clip_high=1.0), GMPO()], ids=str)
def test_weights_of_tokens_count_with_their_mean_over_the_response(loss: GSPO | GMPO) -> None:
    old = torch.tensor([-1.1, -2.3], dtype=torch.float64)
    rollout = old - torch.tensor([0.5, 1.5], dtype=torch.float64).log()  # weights of 0.5 and 1.5
    view = view_of([-1.0, -2.0], old_logprobs=old, rollout_logprobs=rollout, dtype=torch.float64)
    alone, weighed, geometric = (
        run_step(view, loss=loss, callbacks=callbacks).gradient
        for callbacks in ([], [TruncatedIS()], [TruncatedIS("geometric")])
    )
    assert_close(weighed, alone)
    assert_close(geometric, alone * math.sqrt(0.75))
