"""TruncatedIS: weights from old to rollout, capped, without gradient; a chain with PPO's ratio."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from kit.support import fit, run_step, tiny_module, view_of, weights_of
from torch.optim import SGD
from torch.testing import assert_close

from lightning_rl import CISPO, Reinforce
from lightning_rl.callbacks import TruncatedIS
from lightning_rl.corrections import Corrections

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


def test_a_sequence_may_weigh_the_geometric_mean_of_its_valid_tokens() -> None:
    old, rollout = [[*OLD[:2], NAN], OLD], [[*ROLLOUT[:2], 0.0], ROLLOUT]
    view = view_of([[-1.0] * 3] * 2, old_logprobs=old, rollout_logprobs=rollout, valid=[[1, 1, 0], [1, 1, 1]])
    weight = TruncatedIS("geometric", cap=1.25).token_weight(view)
    assert_close(weight, torch.tensor([[1.5**0.5] * 3, [1.25] * 3]))  # 2.25 ** (1 / 3) is 1.31


def test_weights_may_have_a_floor() -> None:
    view = view_of([-1.0, -1.0, -1.0], old_logprobs=OLD, rollout_logprobs=ROLLOUT)
    correction = TruncatedIS(cap=2.0, floor=0.8)
    assert_close(correction.token_weight(view), torch.tensor([[2.0, 0.8, 1.5]]))
    logged = run_step(view, callbacks=[correction]).metrics
    assert logged["truncated_is/capped"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("level", "weights"),
    [
        pytest.param("token", [[2.0, 0.5], [2.0, 1.0]], id="mean-of-three-tokens"),  # 2, .5 and 2; the fourth is masked
        pytest.param("sequence", [[1.5, 1.5], [4.0, 4.0]], id="mean-of-two-rows"),  # 1.5 and 4; the third has no token
    ],
)
def test_normalized_weights_have_a_mean_of_one_over_the_rollout(level: Any, weights: list[list[float]]) -> None:
    ratios = [[3.0, 0.5], [4.0, 1.0], [9.0, 9.0]]
    logs: dict[str, Any] = {
        "old_logprobs": [[math.log(ratio) for ratio in row] for row in ratios],
        "rollout_logprobs": [[0.0] * 2] * 3,
    }
    view = view_of([[-1.0] * 2] * 3, valid=[[1, 1], [1, 0], [0, 0]], dtype=torch.float64, **logs)
    correction = TruncatedIS(level, normalized=True)
    found = correction.token_weight(Corrections([correction]).provide(view))
    mean = 1.5 if level == "token" else 2.75
    assert_close(found[:2], torch.tensor(weights, dtype=torch.float64) / mean)


def test_a_mean_of_one_does_not_depend_on_how_a_step_is_cut() -> None:
    logs: dict[str, Any] = {"old_logprobs": [[0.4], [-0.3]], "rollout_logprobs": [[0.0], [0.0]]}
    view = view_of([[-1.0], [-1.0]], dtype=torch.float64, **logs)
    correction = TruncatedIS(normalized=True)
    view = Corrections([correction]).provide(view)
    parts = [correction.token_weight(view.select(torch.tensor([row]))) for row in (0, 1)]
    assert torch.equal(torch.cat(parts), correction.token_weight(view))
    assert float(torch.cat(parts).mean()) == pytest.approx(1.0)


def test_it_provides_and_reads_early_only_if_normalized() -> None:
    plain, normal = TruncatedIS(), TruncatedIS(normalized=True)
    assert "provide" not in plain.contributes and not plain.reads and not plain.batch_statistics
    assert "provide" in normal.contributes and normal.reads == ("old_logprobs", "rollout_logprobs")
    assert normal.batch_statistics


@pytest.mark.parametrize("correction", [TruncatedIS(), TruncatedIS("sequence", normalized=True)])
def test_a_fit_with_an_exact_engine_is_the_one_without_it(correction: TruncatedIS) -> None:
    options: dict[str, Any] = {"epochs_per_rollout": 2, "optimizer": partial(SGD, lr=0.05)}
    plain, corrected = tiny_module(**options), tiny_module(**options)
    fit(plain, max_steps=4)
    fit(corrected, callbacks=[correction], max_steps=4)
    assert_close(weights_of(corrected), weights_of(plain), rtol=0, atol=1e-4)


def test_logs_the_ratio_before_the_cap_and_how_often_it_binds() -> None:
    view = view_of([-1.0] * 3, old_logprobs=OLD, rollout_logprobs=ROLLOUT)
    logged = run_step(view, callbacks=[TruncatedIS(cap=1.4)]).metrics
    assert logged["truncated_is/ratio"] == pytest.approx(5 / 3, rel=1e-6)
    assert logged["truncated_is/ratio_max"] == pytest.approx(3.0, rel=1e-6)
    assert logged["truncated_is/capped"] == pytest.approx(2 / 3)
    assert logged["truncated_is/weight_mean"] == pytest.approx(3.3 / 3, rel=1e-6)


@pytest.mark.parametrize("loss", ["dppo", CISPO(anchor="rollout")])
def test_a_loss_anchored_on_the_rollout_is_refused_with_a_way_out(loss: Any) -> None:
    message = "rollout policy would count twice as denominator: leave TruncatedIS out; a mask"
    with pytest.raises(ValueError, match=message):
        fit(tiny_module(loss=loss), callbacks=[TruncatedIS()])
