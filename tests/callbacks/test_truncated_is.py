"""TruncatedIS: weights from old to rollout, capped, without gradient; a chain with PPO's ratio."""

import math
from typing import Any

import pytest
import torch
from kit.support import fit, run_step, tiny_module, view_of
from torch.testing import assert_close

from lightning_rl import CISPO, Reinforce
from lightning_rl.callbacks import TruncatedIS

NAN = math.nan
OLD, ROLLOUT = [math.log(0.6), math.log(0.3), math.log(0.9)], [math.log(0.2), math.log(0.6), math.log(0.6)]


def test_each_token_weighs_its_capped_ratio() -> None:
    view = view_of([-1.0, -1.0, -1.0], old_logprobs=OLD, rollout_logprobs=ROLLOUT)
    weight = TruncatedIS(cap=2.0).token_weight(view)
    assert_close(weight, torch.tensor([[2.0, 0.5, 1.5]]))
    assert not weight.requires_grad


def test_the_gradient_is_that_of_the_loss_times_the_weight() -> None:
    view = view_of([-1.0, -1.0, -1.0], old_logprobs=OLD, rollout_logprobs=ROLLOUT, advantages=[1.0, 2.0, -1.0])
    gradient = run_step(view, callbacks=[TruncatedIS(cap=2.0)], loss=Reinforce()).gradient
    assert_close(gradient, torch.tensor([[-2.0, -1.0, 1.5]]) / 3)


def test_a_sequence_weighs_the_capped_product_of_its_valid_tokens() -> None:
    view = view_of(
        [[-1.0] * 3] * 2,
        old_logprobs=[OLD, [*OLD[:2], NAN]],
        rollout_logprobs=[ROLLOUT, [*ROLLOUT[:2], 0.0]],
        valid=[[True] * 3, [True, True, False]],
    )
    assert_close(TruncatedIS("sequence").token_weight(view)[:, 0], torch.tensor([2.25, 1.5]))
    assert_close(TruncatedIS("sequence", cap=2.0).token_weight(view)[:, 0], torch.tensor([2.0, 1.5]))


def test_logs_the_ratio_before_the_cap_and_how_often_it_binds() -> None:
    view = view_of([-1.0] * 3, old_logprobs=OLD, rollout_logprobs=ROLLOUT)
    logged = run_step(view, callbacks=[TruncatedIS(cap=1.4)]).metrics
    assert logged["truncated_is/ratio"] == pytest.approx(5 / 3, rel=1e-6)
    assert logged["truncated_is/ratio_max"] == pytest.approx(3.0, rel=1e-6)
    assert logged["truncated_is/capped"] == pytest.approx(2 / 3)
    assert logged["truncated_is/weight_mean"] == pytest.approx(3.3 / 3, rel=1e-6)


def test_goes_with_the_clipped_surrogate_in_a_fit() -> None:
    assert fit(tiny_module(epochs=2), callbacks=[TruncatedIS()]).global_step == 8


@pytest.mark.parametrize("loss", ["dppo", CISPO(anchor="rollout")])
def test_a_loss_anchored_on_the_rollout_is_refused_with_a_way_out(loss: Any) -> None:
    message = "rollout policy would count twice as denominator: leave TruncatedIS out; a mask"
    with pytest.raises(ValueError, match=message):
        fit(tiny_module(loss=loss), callbacks=[TruncatedIS()])


@pytest.mark.parametrize(("level", "cap"), [("row", None), ("token", 0.5), ("token", NAN)])
def test_refuses_unknown_levels_and_caps_below_one(level: str, cap: float | None) -> None:
    with pytest.raises(ValueError, match=r"expected (level|cap)"):
        TruncatedIS(level, cap=cap)  # pyright: ignore[reportArgumentType]
