"""DivergenceMask: binary KL of both directions, k2 or k3, of tokens or of whole responses."""

import math
from typing import Any

import pytest
import torch
from kit.support import run_step, view_of

from lightning_rl import LossView, Reinforce
from lightning_rl.callbacks import DivergenceMask, IcePop

NAN = math.nan


def pair(engine: list[float], trainer: list[float], **given: Any) -> LossView:
    """One row of tokens with these probabilities at the engine and the trainer."""
    logs = {name: [math.log(p) for p in ps] for name, ps in (("rollout_logprobs", engine), ("old_logprobs", trainer))}
    return view_of([-1.0] * len(engine), dtype=torch.float64, **dict[str, Any](logs) | given)


def coin(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


@pytest.mark.parametrize(
    ("engine", "trainer", "larger"),
    [
        pytest.param(0.99, 0.60, coin(0.6, 0.99), id="sure-token"),  # 1.17; the other direction is 0.46
        pytest.param(0.60, 0.99, coin(0.6, 0.99), id="the-same-backwards"),
        pytest.param(0.001, 0.01, coin(0.01, 0.001), id="rare-token"),  # 0.014
        pytest.param(0.5, 0.5, 0.0, id="agreed"),
    ],
)
def test_a_token_is_kept_up_to_the_larger_of_both_directions(engine: float, trainer: float, larger: float) -> None:
    view = pair([engine], [trainer])
    assert DivergenceMask(larger + 1e-9).token_mask(view).item()
    assert larger == 0 or not DivergenceMask(larger - 1e-9).token_mask(view).item()
    measured = DivergenceMask(1.0).metrics(view)["divergence_mask/divergence"].value()
    assert measured == pytest.approx(larger, abs=1e-12)


def test_it_spares_rare_tokens_and_finds_sure_ones_where_a_ratio_does_the_opposite() -> None:
    view = pair([0.99, 0.001], [0.60, 0.01])
    assert DivergenceMask(0.1).token_mask(view).tolist() == [[False, True]]
    assert IcePop(0.5, 5.0).token_mask(view).tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("divergence", "gap", "value"),
    [("k2", 0.4, 0.08), ("k2", -0.4, 0.08), ("k3", 0.4, math.exp(0.4) - 1.4), ("k3", -0.4, math.exp(-0.4) - 0.6)],
)
def test_k2_and_k3_estimate_the_kl_from_engine_to_trainer(divergence: Any, gap: float, value: float) -> None:
    view = view_of([-1.0], old_logprobs=[-1.0 + gap], rollout_logprobs=[-1.0], dtype=torch.float64)
    kept = [DivergenceMask(bound, divergence=divergence).token_mask(view).item() for bound in (value + 1e-9, value / 2)]
    assert kept == [True, False]


@pytest.mark.parametrize(
    ("level", "bound", "kept"),
    [
        ("mean", 0.05, True), ("mean", 0.03, False), ("sum", 0.09, True), ("sum", 0.05, False),
        ("max", 0.081, True), ("max", 0.07, False),
    ],
)  # fmt: skip
def test_a_response_goes_by_its_mean_its_sum_or_its_largest(level: Any, bound: float, kept: bool) -> None:
    old, valid = [-0.6, -1.0, -9.0], [1, 1, 0]  # k2 of .08, 0 and, at a masked token, 32
    view = view_of([-1.0] * 3, old_logprobs=old, rollout_logprobs=[-1.0] * 3, valid=valid, dtype=torch.float64)
    mask = DivergenceMask(bound, divergence="k2", level=level)
    assert mask.sequence_mask(view).tolist() == [kept]
    assert "token_mask" not in mask.contributes


def test_what_is_left_out_counts_in_the_denominator() -> None:
    view = pair([0.9, 0.5], [0.5, 0.5])
    step = run_step(view, callbacks=[DivergenceMask(0.01)], loss=Reinforce())
    assert step.gradient.tolist() == [[0.0, -0.5]]
    assert step.metrics["divergence_mask/rejected_tokens"] == 0.5
    assert step.metrics["divergence_mask/divergence_max"] == pytest.approx(coin(0.5, 0.9))
