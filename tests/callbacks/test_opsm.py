"""OPSM: a bad response that drifted is rejected as a whole, and stays in the denominator."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.support import run_step, view_of
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import LossView, sequence_mean, token_mean
from lightning_rl.callbacks import OPSM

NAN, INF = math.nan, math.inf


def witness() -> LossView:
    return view_of([0.0, 0.0, 0.0], old_logprobs=[1.0, 1.0, 1.0], advantages=[-0.5, 0.25, -0.25])


def test_witness_the_whole_row_is_rejected() -> None:
    step = run_step(witness(), callbacks=[OPSM(0.1)])
    assert float(step.loss) == 0.0
    assert step.gradient.tolist() == [[0.0, 0.0, 0.0]]
    assert step.metrics["opsm/rejected"] == 1.0 and step.metrics["opsm/drift"] == 1.0


def test_witness_without_the_mask() -> None:
    loss = float(run_step(witness()).loss)
    assert loss == pytest.approx((0.4 - 0.09196986 + 0.2) / 3, abs=1e-6)
    small = view_of([0.0] * 3, old_logprobs=[0.01] * 3, advantages=[-0.5, 0.25, -0.25])
    assert run_step(small, callbacks=[OPSM(0.1)]).metrics["opsm/rejected"] == 0.0


@pytest.mark.parametrize(("reduction", "slope"), [(sequence_mean, -1 / 2), (token_mean, -1 / 3)])
def test_rejected_response_still_counts_in_the_denominator(reduction: Any, slope: float) -> None:
    view = view_of(
        [[-1.0, 0.0], [-1.0, -1.0]],
        valid=[[1, 0], [1, 1]],
        old_logprobs=[[-1.0, 0.0], [-0.1, -0.1]],
        advantages=[[1.0, 0.0], [-1.0, -1.0]],
    )
    step = run_step(view, callbacks=[OPSM(delta=0.5)], reduction=reduction)
    assert_close(step.gradient, torch.tensor([[slope, 0.0], [0.0, 0.0]]))
    assert step.metrics["opsm/rejected"] == 0.5
    assert step.metrics["opsm/drift"] == pytest.approx(0.45)


def test_measures_drift_from_the_engine_if_told_to() -> None:
    view = view_of([-1.0], old_logprobs=[-1.0], rollout_logprobs=[-0.1], advantages=[-1.0])
    assert OPSM(0.5).sequence_mask(view).item()
    assert not OPSM(0.5, against="rollout").sequence_mask(view).item()
    assert run_step(view, callbacks=[OPSM(0.5, against="rollout")]).metrics["opsm/drift"] == pytest.approx(0.9)
    assert (OPSM().reads_at_loss, OPSM(against="rollout").reads_at_loss) == (("old_logprobs",), ("rollout_logprobs",))


@given(
    drift=st.floats(-5, 5, width=32),
    advantage=st.floats(-3, 3, width=32),
    delta=st.floats(0.25, 3, width=32),
)
def test_never_rejects_a_good_response(drift: float, advantage: float, delta: float) -> None:
    view = view_of(logprobs=[-6.0], old_logprobs=[-6.0 + drift], advantages=[advantage])
    assert OPSM(delta).sequence_mask(view).item() or (advantage < 0 and drift > 0)


def test_untrained_rows_are_not_in_the_fraction() -> None:
    view = view_of([[-1.0], [-1.0]], old_logprobs=[[-0.1], [-0.1]], advantages=[[-1.0], [-1.0]], valid=[[1], [0]])
    step = run_step(view.replace(trained=torch.tensor([True, False])), callbacks=[OPSM(0.5)])
    assert step.metrics["opsm/rejected"] == 1.0


def drifting(drift: Tensor, advantages: Tensor, valid: Tensor) -> LossView:
    return view_of(torch.zeros_like(drift), old_logprobs=drift, advantages=advantages, valid=valid, dtype=drift.dtype)


@pytest.mark.parametrize(
    ("drift", "advantages", "valid", "marked"),
    [
        pytest.param([1.0, 1.0, 1.0], [-0.5, 0.25, -0.25], [1, 1, 1], True, id="opsm-witness"),
        pytest.param([0.75, 0.75], [-1.0, -1.0], [1, 1], True, id="above-delta"),
        pytest.param([0.5, 0.5], [-1.0, -1.0], [1, 1], False, id="exactly-delta"),
        pytest.param([0.75, 0.75], [0.0, 0.0], [1, 1], False, id="neutral"),
        pytest.param([0.75, 0.75], [1.0, 1.0], [1, 1], False, id="good"),
        pytest.param([-9.0, -9.0], [-1.0, -1.0], [1, 1], False, id="likelier-now"),
        pytest.param([1.5, 0.0], [-1.0, -1.0], [1, 1], True, id="mean-drift-not-minimum"),
        pytest.param([0.9, 0.0], [-1.0, -1.0], [1, 1], False, id="mean-drift-not-maximum"),
        pytest.param([0.75, 0.75], [-3.0, 1.0], [1, 1], True, id="mean-advantage-negative"),
        pytest.param([0.75, 0.75], [-1.0, 3.0], [1, 1], False, id="mean-advantage-positive"),
        pytest.param([0.75, -INF], [-1.0, NAN], [1, 0], True, id="poison-does-not-rescue"),
        pytest.param([0.4, 9.0], [-1.0, -9.0], [1, 0], False, id="padding-does-not-condemn"),
        pytest.param([1.0, 0.0], [-1.0, 0.0], [1, 0], True, id="padding-does-not-dilute"),
        pytest.param([9.0, 9.0], [-9.0, -9.0], [0, 0], False, id="no-valid-token"),
    ],
)
def test_marks_rows_that_drifted_and_are_bad(
    drift: list[float], advantages: list[float], valid: list[int], marked: bool
) -> None:
    view = drifting(torch.tensor([drift]), torch.tensor([advantages]), torch.tensor([valid], dtype=torch.bool))
    assert OPSM(0.5).sequence_mask(view).tolist() == [not marked]


def test_the_decision_carries_no_gradient_and_accepts_no_rows() -> None:
    bad = drifting(torch.ones(1, 2), -torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))
    assert bad.logprobs.requires_grad and not OPSM(0.5).sequence_mask(bad).requires_grad
    nothing = torch.zeros(0, 2)
    assert OPSM(0.5).sequence_mask(drifting(nothing, nothing, nothing.bool())).shape == (0,)
