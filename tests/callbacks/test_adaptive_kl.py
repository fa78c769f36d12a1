"""AdaptiveKL: a coefficient that follows the KL measured over all ranks, in steps of at most a fifth."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from kit.support import (
    SummedBy,
    fit,
    in_lockstep,
    recorder,
    rollout_of,
    run_step,
    tiny_module,
    tiny_policy,
    view_of,
    view_of_rollout,
)
from lightning.pytorch import Callback
from torch import Tensor
from torch.optim import SGD
from torch.testing import assert_close
from typing_extensions import override

from lightning_rl import Rollout
from lightning_rl.callbacks import AdaptiveKL
from lightning_rl.rollout import concatenate
from lightning_rl.signal.masked import GlobalSum, row_mean


def rollout_of_gaps(*gaps: list[float], tokens: list[list[int]] | None = None, **given: Any) -> Rollout:
    """Rows whose old policy lies above the reference by these gaps."""
    ref = torch.full((len(gaps), len(gaps[0])), -1.0)
    mask = tokens or [[1] * len(row) for row in gaps]
    return rollout_of([0.0] * len(gaps), mask, old_logprobs=ref + torch.tensor(gaps), ref_logprobs=ref, **given)


UNEVEN = ([0.3, 0.1], [0.1, 9.0])  # rows of mean 0.2 and, without its masked token, 0.1: 0.15 of rows, 0.167 of tokens
MASK = [[1, 1], [1, 0]]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        pytest.param(0.05, 0.5 * (1 + 0.2 * 2 / 10), id="far-above-by-a-fifth"),
        pytest.param(0.14, 0.5 * (1 + (0.15 / 0.14 - 1) * 2 / 10), id="a-little-above"),
        pytest.param(0.16, 0.5 * (1 + (0.15 / 0.16 - 1) * 2 / 10), id="a-little-below"),
        pytest.param(1.0, 0.5 * (1 - 0.2 * 2 / 10), id="far-below-by-a-fifth"),
    ],
)
def test_the_coefficient_moves_with_the_mean_of_the_rows(target: float, expected: float) -> None:
    callback = AdaptiveKL(0.5, target=target, horizon=10)
    callback.observe(rollout_of_gaps(*UNEVEN, tokens=MASK))
    assert callback.beta == pytest.approx(expected, rel=1e-6)


def test_a_negative_estimate_lowers_it_by_a_fifth_and_k3_has_none() -> None:
    rollout = rollout_of_gaps([-0.5, -0.5])
    k1, k3 = AdaptiveKL(0.5, horizon=1), AdaptiveKL(0.5, horizon=1, estimator="k3")
    k1.observe(rollout)
    k3.observe(rollout)
    assert (k1.beta, k3.beta) == (pytest.approx(0.4), pytest.approx(0.6))


def test_rows_that_do_not_train_are_not_counted() -> None:
    rollout = rollout_of_gaps([0.15], [9.0], [0.15], trained=[True, False, True])
    alone, joined = AdaptiveKL(0.5, target=0.14, horizon=10), AdaptiveKL(0.5, target=0.14, horizon=10)
    joined.observe(rollout)
    alone.observe(rollout_of_gaps([0.15], [0.15]))
    assert joined.beta == pytest.approx(alone.beta, rel=1e-12)
    joined.observe(rollout.replace(trained=torch.zeros(3, dtype=torch.bool)))
    assert joined.beta == pytest.approx(alone.beta, rel=1e-12), "nothing measured, nothing changed"


def test_ranks_agree_and_are_one_device_cut_in_two() -> None:
    parts = rollout_of_gaps([0.3], [0.2], [0.1]), rollout_of_gaps([0.01])

    def rank(rows: Rollout) -> Any:
        def observed(global_sum: GlobalSum) -> Tensor:
            callback = AdaptiveKL(0.5, target=0.14, horizon=10)
            callback.collectives = SummedBy(global_sum)
            callback.observe(rows)
            return torch.tensor(callback.beta, dtype=torch.float64)

        return observed

    whole = AdaptiveKL(0.5, target=0.14, horizon=10)
    whole.observe(concatenate(parts))
    assert whole.beta == pytest.approx(0.5 * (1 + (0.1525 / 0.14 - 1) * 4 / 10), rel=1e-6)
    for found in in_lockstep(*(rank(part) for part in parts)):
        assert float(found) == pytest.approx(whole.beta, rel=1e-12)


def test_the_new_coefficient_counts_from_the_next_reward_or_loss() -> None:
    rollout, view = rollout_of_gaps([0.5]), view_of([-0.5], ref_logprobs=[-1.0], advantages=[0.0])
    reward, loss = AdaptiveKL(0.5, horizon=1), AdaptiveKL(0.5, horizon=1, as_loss=True, estimator="k2")
    before = run_step(view, callbacks=[loss])
    for callback in (reward, loss):
        callback.observe(rollout)
    assert_close(reward.token_reward(rollout), torch.tensor([[-0.6 * 0.5]]))
    after = run_step(view, callbacks=[loss])
    assert_close([after.loss, after.gradient], [1.2 * before.loss, 1.2 * before.gradient])
    assert (before.metrics["adaptive_kl/beta"], after.metrics["adaptive_kl/beta"]) == (0.5, pytest.approx(0.6))
    assert after.metrics["adaptive_kl/loss"] == before.metrics["adaptive_kl/loss"] == 0.125
    assert after.metrics["adaptive_kl/estimate"] == 0.125 and after.metrics["adaptive_kl/positive"] == 1.0


def test_its_state_is_the_coefficient() -> None:
    callback, other = AdaptiveKL(0.5, horizon=1), AdaptiveKL(0.5, horizon=1)
    callback.observe(rollout_of_gaps([0.5]))
    other.load_state_dict(callback.state_dict())
    assert other.beta == callback.beta == pytest.approx(0.6) and callback.state_key == "adaptive_kl"


def test_in_a_fit_it_follows_every_rollout() -> None:
    seen: list[Rollout] = []
    callback = AdaptiveKL(0.05, target=0.01, horizon=50)
    fit(tiny_module(advantages="reinforce_plus_plus"), callbacks=[callback, recorder(seen)("recorder")])
    beta = 0.05
    for rollout in seen:
        gap = rollout.require("old_logprobs") - rollout.require("ref_logprobs")
        measured = float(row_mean(gap, rollout.valid_tokens).double().mean())
        beta *= 1 + max(min(measured / 0.01 - 1, 0.2), -0.2) * 16 / 50
    assert len(seen) == 4 and callback.beta == pytest.approx(beta, rel=1e-5) and beta != 0.05


def test_both_forms_measure_on_the_old_policy() -> None:
    reward, loss = AdaptiveKL(), AdaptiveKL(as_loss=True)
    assert reward.reads == loss.reads == ("old_logprobs", "ref_logprobs")
    assert reward.contributes == {"token_reward", "metrics", "observe"}
    assert loss.contributes == {"loss_term", "metrics", "observe"}


def test_a_loss_that_trains_nothing_warns_at_the_line_that_made_it() -> None:
    with pytest.warns(UserWarning, match="AdaptiveKL with k1 as a loss") as caught:
        AdaptiveKL(as_loss=True, estimator="k1")
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("measured", "number", "expected"),
    [
        pytest.param(0.1, 100, 0.5, id="on-target"),
        pytest.param(0.11, 100, 0.55, id="a-little-above"),
        pytest.param(0.09, 100, 0.45, id="a-little-below"),
        pytest.param(9.0, 100, 0.6, id="at-most-a-fifth-up"),
        pytest.param(0.0, 100, 0.4, id="at-most-a-fifth-down"),
        pytest.param(-9.0, 100, 0.4, id="an-estimate-below-0"),
        pytest.param(9.0, 50, 0.55, id="half-a-horizon"),
        pytest.param(9.0, 0, 0.5, id="no-sample"),
        pytest.param(0.0, 500, 0.5 * 0.8**5, id="once-per-horizon-down"),
        pytest.param(0.0, 512, 0.5 * 0.8**5 * (1 - 0.2 * 0.12), id="and-the-rest-of-a-horizon"),
        pytest.param(9.0, 1000, 0.5 * 1.2**10, id="once-per-horizon-up"),
        pytest.param(0.11, 250, 0.5 * 1.1**2 * 1.05, id="once-per-horizon-near-the-target"),
        pytest.param(math.inf, 100, 0.6, id="infinite"),
        pytest.param(math.nan, 100, 0.5, id="nan-changes-nothing"),
    ],
)
def test_the_coefficient_moves_towards_its_target(measured: float, number: int, expected: float) -> None:
    callback = AdaptiveKL(0.5, target=0.1, horizon=100)
    callback.adapt(measured, number)
    assert callback.beta == pytest.approx(expected)


@pytest.mark.parametrize("measured", [0.0, 9.0])
@pytest.mark.parametrize("number", [51_200, 10**9])
def test_a_large_rollout_leaves_a_coefficient_that_adapts(measured: float, number: int) -> None:
    callback = AdaptiveKL(0.05, target=0.1)
    for _ in range(20):
        callback.adapt(measured, number)
    left = float(torch.tensor(callback.beta))
    assert 0 < left < math.inf
    callback.adapt(9.0 - measured, 10_000)
    assert callback.beta == pytest.approx(left * (1.2 if measured == 0 else 0.8), rel=1e-6)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_logged_coefficient_is_the_one_of_the_penalty_in_its_row(steps: int) -> None:
    seen: list[Rollout] = []
    rows: list[dict[str, float]] = []

    class Rows(Callback):
        @override
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
            rows.append(dict(pl_module.run.metrics.values()))

    module = tiny_module(
        reference=partial(tiny_policy, 1),
        advantages="reinforce_plus_plus",
        minibatches_per_rollout=steps,
        optimizer=partial(SGD, lr=0.1),
    )
    fit(module, max_steps=3 * steps, callbacks=[AdaptiveKL(0.05, horizon=16), recorder(seen)("seen"), Rows()])
    betas = set()
    for place, row in enumerate(rows):
        rollout = seen[place // steps]
        gap = (rollout.require("old_logprobs") - rollout.require("ref_logprobs"))[rollout.valid_tokens].mean()
        if "kl/penalty" in row:
            assert row["kl/penalty"] == pytest.approx(row["adaptive_kl/beta"] * float(gap), rel=1e-5)
        betas.add(round(row["adaptive_kl/beta"], 6))
    assert betas == {0.05, 0.06, 0.072}


@pytest.mark.parametrize(("as_loss", "expected"), [(True, 0.6), (False, 0.5)])
def test_what_applies_to_a_rollout_survives_a_checkpoint(*, as_loss: bool, expected: float) -> None:
    callback, resumed = (AdaptiveKL(0.5, horizon=1, as_loss=as_loss) for _ in range(2))
    rollout = rollout_of_gaps([2.0, 2.0])
    callback.observe(rollout)
    resumed.load_state_dict(callback.state_dict())
    view = view_of_rollout(rollout, rollout.require("old_logprobs"))
    found = [float(one.metrics(view)["adaptive_kl/beta"].value()) for one in (callback, resumed)]
    assert found == pytest.approx([expected] * 2, rel=1e-6)
