"""RolloutKL: a term of the loss that pulls the policy back to the engine's."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.support import run_step, view_of
from torch.testing import assert_close

from lightning_rl import LossView, Reinforce
from lightning_rl.callbacks import RolloutKL
from lightning_rl.signal.kl import absolute

NAN, INF = math.nan, math.inf


def witness(valid: Any = ((1, 1), (1, 0)), **given: Any) -> LossView:
    known = dict[str, Any](rollout_logprobs=[[-1.5, -2.0], [-1.0, -3.0]], advantages=[[0.0, 0.0], [0.0, 0.0]])
    return view_of([[-1.0, -2.0], [-1.0, -1.0]], valid=valid, **known | given)


def test_witness() -> None:
    step = run_step(witness(), callbacks=[RolloutKL(1.0)], loss=Reinforce())
    assert float(step.loss) == pytest.approx(0.03125, abs=1e-6)
    assert_close(step.gradient, torch.tensor([[0.125, 0.0], [0.0, 0.0]]), atol=1e-6, rtol=0)
    assert step.metrics["rollout_kl/loss"] == pytest.approx(0.03125, abs=1e-6)
    assert step.metrics["rollout_kl/estimate"] == pytest.approx(0.125 / 3)
    assert step.metrics["rollout_kl/drifted"] == pytest.approx(1 / 3)


def test_a_row_without_tokens_dilutes_and_a_padding_row_does_not() -> None:
    masked = witness(valid=[[1, 1], [0, 0]])
    found = run_step(masked, callbacks=[RolloutKL(1.0)], loss=Reinforce())
    assert float(found.loss) == pytest.approx(0.03125, abs=1e-6)
    padding = masked.replace(trained=torch.tensor([True, False]))
    assert float(run_step(padding, callbacks=[RolloutKL(1.0)], loss=Reinforce()).loss) == pytest.approx(
        0.0625, abs=1e-6
    )


@pytest.mark.parametrize(
    ("estimator", "values", "gradient"),
    [
        pytest.param("k2", [0.125, 0, 0.5, 18], [0.5, 0, -1, -6], id="k2"),
        pytest.param("k3", [0.1065307, 0, 0.7182818, 396.4287934], [0.3934693, 0, -1.7182818, -402.4287934], id="k3"),
    ],
)
def test_estimators_reach_the_loss_without_a_clamp(estimator: str, values: list[float], gradient: list[float]) -> None:
    view = view_of(
        [-1.0, -2.0, -3.0, -8.0], rollout_logprobs=[-1.5, -2.0, -2.0, -2.0], advantages=[0.0] * 4, dtype=torch.float64
    )
    step = run_step(view, callbacks=[RolloutKL(2.0, estimator=estimator)], loss=Reinforce())
    assert float(step.loss) == pytest.approx(2 * sum(values) / 4, abs=1e-6)
    assert_close(step.gradient, torch.tensor([gradient], dtype=torch.float64) * 2 / 4, atol=1e-6, rtol=0)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@given(gap=st.floats(0, 90), more=st.floats(0.1, 10), sign=st.sampled_from([1, -1]))
def test_the_pull_grows_with_the_drift(estimator: str, gap: float, more: float, sign: int) -> None:
    def pull(distance: float) -> float:
        view = view_of([-100.0], rollout_logprobs=[-100.0 - sign * distance], advantages=[0.0], dtype=torch.float64)
        return sign * run_step(view, callbacks=[RolloutKL(1.0, estimator=estimator)]).gradient.item()

    assert pull(gap + more) >= pull(gap) >= 0


@pytest.mark.parametrize("estimator", ["k1", "abs"])
def test_estimators_that_do_not_pull_work_and_warn(estimator: str) -> None:
    with pytest.warns(UserWarning, match=f"RolloutKL with {estimator}: its gradient does not shrink"):
        callback = RolloutKL(1.0, estimator=estimator)
    assert run_step(witness(), callbacks=[callback], loss=Reinforce()).gradient[0, 0] == 0.25


def test_an_estimator_may_be_a_function() -> None:
    fourth = RolloutKL(estimator=lambda new, other: (new - other) ** 4)
    step = run_step(view_of([-1.0], rollout_logprobs=[-3.0]), callbacks=[fourth])
    assert step.metrics["rollout_kl/loss"] == pytest.approx(16.0)
    with pytest.warns(UserWarning, match="RolloutKL with abs: its gradient does not shrink"):
        RolloutKL(estimator=absolute)
