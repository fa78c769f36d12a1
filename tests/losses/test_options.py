"""Declarations, options and metrics of losses."""

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from kit.support import fit, run_step, tiny_module, view_of

from lightning_rl import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GSPO,
    M2PO,
    SAPO,
    VESPO,
    ClipCov,
    ClippedSurrogate,
    KLCov,
    PolicyLoss,
    Reinforce,
    SequenceSumNorm,
    ValueLoss,
)
from lightning_rl.signal.kl import Clamped, k3
from lightning_rl.signal.masked import local_sum
from lightning_rl.signal.selection import local_values

NAN = math.nan
OLD, ROLLOUT = ("old_logprobs",), ("rollout_logprobs",)


@pytest.mark.parametrize(
    ("loss", "ratio", "reads", "prepares"),
    [
        (ClippedSurrogate(), ("current", "old"), OLD, False),
        (Reinforce(), None, (), False),
        (GSPO(), ("current", "old"), OLD, False),
        (GSPO(anchor="rollout"), ("current", "rollout"), ROLLOUT, False),
        (GMPO(), ("current", "old"), OLD, False),
        (VESPO(), ("current", "rollout"), ROLLOUT, False),
        (VESPO(anchor="old"), ("current", "old"), OLD, False),
        (DRO(), None, ROLLOUT, False),
        (DRO(anchor="old"), None, OLD, False),
        (SAPO(), ("current", "old"), OLD, False),
        (CISPO(), ("current", "old"), OLD, False),
        (CISPO(anchor="rollout"), ("current", "rollout"), ROLLOUT, False),
        (DPPO(), ("current", "rollout"), ROLLOUT, False),
        (ClipCov(), ("current", "old"), OLD, True),
        (KLCov(), ("current", "old"), OLD, True),
        (M2PO(), ("current", "old"), (*OLD, *ROLLOUT), True),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, PolicyLoss) else "",
)
def test_what_a_loss_declares(loss: PolicyLoss, ratio: Any, reads: tuple[str, ...], *, prepares: bool) -> None:
    assert (loss.ratio, loss.reads, loss.prepares) == (ratio, reads, prepares)


@pytest.mark.parametrize(
    "loss", [ClippedSurrogate(), GSPO(), GMPO(), SAPO(), CISPO(), DPPO(), ClipCov(), M2PO(), VESPO(), DRO()]
)
def test_what_it_declares_is_what_it_needs(loss: PolicyLoss) -> None:
    for missing in loss.reads:
        given: dict[str, Any] = {"rollout_logprobs": [-1.0]}
        view = view_of([-1.0], **given).replace(**{missing: None}, prepared=torch.ones(1, 1, dtype=torch.bool))
        at_prepare = loss.prepares and missing == "rollout_logprobs"
        ask = partial(loss.prepare, [view], local_sum, local_values) if at_prepare else partial(loss, view)
        with pytest.raises(ValueError, match=f'expected the rollout field "{missing}" to be set'):
            ask()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ClippedSurrogate, {"clip_low": -0.1}, r"clip_low in \[0, 1\], got -0.1"),
        (ClippedSurrogate, {"clip_high": NAN}, r"clip_high >= 0, got nan"),
        (
            ClippedSurrogate,
            {"clip_low": 0.8, "clip_high": 1.2},
            r"expected clip_low and clip_high to be distances, got 0.8 and 1.2, .*: pass clip_low=0.2, clip_high=0.2",
        ),
        (GSPO, {"clip_low": 0.9997, "clip_high": 1.0004}, r"pass clip_low=0.0003, clip_high=0.0004"),
        (CISPO, {"clip_low": 0.8, "clip_high": 1.28}, r"pass clip_low=0.2, clip_high=0.28"),
        (GMPO, {"clip_low": 0.67, "clip_high": 1.49}, r"pass clip_low=0.4, clip_high=0.399$"),
        (DPPO, {"low": 0.8, "high": 1.2}, r"pass low=0.2, high=0.2"),
        (ClippedSurrogate, {"dual_clip": 1.0}, r"dual_clip > 1 or None, got 1.0"),
        (GSPO, {"clip_low": 1.1}, r"clip_low in \[0, 1\], got 1.1"),
        (GSPO, {"clip_high": -1.0}, r"clip_high >= 0, got -1.0"),
        (CISPO, {"clip_low": 2.0}, r"clip_low in \[0, 1\], got 2.0"),
        (CISPO, {"anchor": "ref"}, r"expected anchor old or rollout, got 'ref'"),
        (DPPO, {"divergence": "js"}, r"expected divergence tv or kl, got 'js'"),
        (DPPO, {"low": -0.1}, r"expected low >= 0, got -0.1"),
        (DPPO, {"high": NAN}, r"expected high >= 0, got nan"),
        (DPPO, {"cap": 0.5}, r"expected cap >= 1 or None, got 0.5"),
        (GSPO, {"anchor": "ref"}, r"expected anchor old or rollout, got 'ref'"),
        (GMPO, {"clip_high": NAN}, r"expected clip_high >= 0, got nan"),
        (VESPO, {"k_positive": -1.0}, r"expected k_positive >= 0, got -1.0"),
        (VESPO, {"lambda_negative": 0.0}, r"expected lambda_negative > 0, got 0.0"),
        (VESPO, {"anchor": "ref"}, r"expected anchor old or rollout, got 'ref'"),
        (DRO, {"beta": -0.1}, r"expected beta >= 0, got -0.1"),
        (DRO, {"anchor": "ref"}, r"expected anchor old or rollout, got 'ref'"),
        (SAPO, {"tau_positive": 0.0}, r"expected tau_positive > 0, got 0.0"),
        (SAPO, {"tau_negative": NAN}, r"tau_negative > 0, got nan"),
        (GMPO, {"clip_low": -0.1}, r"expected clip_low >= 0, got -0.1"),
        (ClipCov, {"fraction": 1.5}, r"expected fraction in \[0, 1\], got 1.5"),
        (ClipCov, {"cov_low": 5.0}, r"cov_low < cov_high, got 5.0 and 5.0"),
        (ClipCov, {"clip_low": 2.0}, r"expected clip_low in \[0, 1\], got 2.0"),
        (KLCov, {"fraction": -0.1}, r"expected fraction in \[0, 1\], got -0.1"),
        (KLCov, {"coef": -1.0}, r"coef >= 0, got -1.0"),
        (M2PO, {"threshold": 0.0}, r"expected threshold > 0, got 0.0"),
        (M2PO, {"dual_clip": 0.9}, r"dual_clip > 1 or None"),
        (ValueLoss, {"clip": 0.0}, r"expected clip > 0 or None, got 0.0"),
        (Clamped, {"estimator": k3, "value": 0.0}, r"expected value > 0, got 0.0"),
        (Clamped, {"estimator": k3, "log_ratio": -1.0}, r"expected log_ratio > 0, got -1.0"),
        (ValueLoss, {"huber": NAN}, r"expected huber > 0, got nan"),
    ],
)
def test_options_out_of_range_are_refused_when_the_loss_is_made(kind: type, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)


@pytest.mark.parametrize(
    ("loss", "metric", "share"),
    [
        (ClippedSurrogate(), "policy/clip_fraction_low", 0.25),
        (ClippedSurrogate(), "policy/clip_fraction_high", 0.25),
        (ClippedSurrogate(clip_high=1.0), "policy/clip_fraction_high", 0.0),
        (CISPO(), "policy/clipped", 0.0),
        (CISPO(clip_low=0.2, clip_high=0.2), "policy/clipped", 1.0),
        (CISPO(clip_low=0.2, clip_high=1.0), "policy/clipped", 0.5),
        (CISPO(clip_low=0.2, clip_high=0.2, anchor="rollout"), "policy/clipped", 0.0),
        (GSPO(), "policy/clip_fraction_low", 0.5),  # the mean of the row shrank: its two bad tokens
        (GSPO(), "policy/clip_fraction_high", 0.0),
    ],
)
def test_shares_of_four_tokens(loss: PolicyLoss, metric: str, share: float) -> None:
    ratios, good = [0.5, 0.5, 1.5, 1.5, 9.0], [-1.0, 1.0, 1.0, -1.0, 1.0]  # the last is masked
    logprobs = [math.log(ratio) - 1 for ratio in ratios]
    given: dict[str, Any] = {"old_logprobs": [-1.0] * 5, "rollout_logprobs": logprobs}
    view = view_of(logprobs, advantages=good, valid=[1, 1, 1, 1, 0], dtype=torch.float64, **given)
    assert run_step(view, loss=loss).metrics[metric] == share


@pytest.mark.parametrize(("gap", "sign", "low", "high"), [(0.01, 1, 0, 0.6), (-0.01, -1, 0.6, 0), (0.01, -1, 0, 0)])
def test_gspo_counts_the_tokens_of_clipped_rows(gap: float, sign: int, low: float, high: float) -> None:
    logprobs = [[-1.0 + gap] * 3, [-1.0, -1.0, -1.0]]
    view = view_of(logprobs, old_logprobs=[[-1.0] * 3] * 2, advantages=[[sign] * 3] * 2, valid=[[1, 1, 1], [1, 1, 0]])
    metrics = run_step(view, loss=GSPO()).metrics
    assert (metrics["policy/clip_fraction_low"], metrics["policy/clip_fraction_high"]) == pytest.approx((low, high))


@pytest.mark.parametrize(
    ("reduction", "warns"), [("token_mean", True), ("sequence_mean", False), (SequenceSumNorm(1), False)]
)
def test_one_ratio_per_response_beside_a_mean_over_tokens_is_warned_of(reduction: Any, *, warns: bool) -> None:
    module = tiny_module(loss="gspo", reduction=reduction)
    with (
        pytest.warns(UserWarning, match="GSPO has one ratio per response, .*sequence_mean") if warns else nullcontext()
    ):
        fit(module, max_steps=1)
