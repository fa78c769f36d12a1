"""Decisions of corrections do not count padding, at any threshold."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.evidence import culprits, evidence_of
from kit.support import callback_of
from torch import Tensor

from lightning_rl import LossTerm, LossView, RLCallback
from lightning_rl.callbacks import OPSM, IcePop, NoEOSMask, OutlierMask, SequenceRatioMask, TruncatedIS
from lightning_rl.signal.masked import row_mean

MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "padded": lambda values, _valid: values.mean(-1),
    "right": row_mean,
}
STATISTICS: dict[str, Callable[[LossView], Tensor]] = {
    "absolute": lambda view: (view.logprobs - view.require("old_logprobs")).abs(),
    "signed": lambda view: view.require("old_logprobs") - view.logprobs,
    "squared": lambda view: (view.logprobs - view.require("old_logprobs")).square() / 2,
    "surprise": lambda view: -view.require("old_logprobs"),
    "entropy": lambda view: view.entropy,
}


def decision(statistic: str, mean: str, threshold: float) -> Callable[[Any], Tensor]:
    """Return a mask of the rows whose mean is below a threshold."""
    return lambda view: MEANS[mean](STATISTICS[statistic](view), view.valid_tokens) < threshold


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("threshold", [0.001, 0.003, 0.03, 0.1, 0.3, 1.0, 3.0])
def test_a_mask_that_averages_over_padding_is_found_at_any_threshold(statistic: str, threshold: float) -> None:
    for mean, found in (("padded", True), ("right", False)):
        mask = decision(statistic, mean, threshold)
        rows = callback_of("rows", sequence_mask=mask)
        tokens = callback_of("tokens", token_mask=lambda view, mask=mask: mask(view)[:, None] & view.valid_tokens)
        weight = callback_of(
            "weight", token_weight=lambda view, mask=mask: 1.0 + mask(view)[:, None] * view.valid_tokens
        )
        term = callback_of(
            "term", loss_term=lambda view, mask=mask: LossTerm(per_token=view.logprobs * mask(view)[:, None], coef=1.0)
        )
        for callback in (rows, tokens, weight, term):
            blamed = culprits("counted_padding", evidence_of(callback))
            assert bool(blamed) is found and all(callback.name in one for one in blamed), (callback.name, mean)


@pytest.mark.parametrize("threshold", [-0.001, -0.1, -1.0, -3.0])
def test_a_mask_of_rows_that_averages_over_padding_is_found(threshold: float) -> None:
    for method in ("exclude", "reward_mask"):
        for mean, found in (("padded", True), ("right", False)):

            def rejects(rollout: Any, mean: str = mean) -> Tensor:
                return MEANS[mean](rollout.rollout_logprobs, rollout.valid_tokens) < threshold

            evidence = evidence_of(callback_of("rows", **{method: rejects}))
            logprobs = torch.where(evidence.rows.valid_tokens, -20.0, 0.0)
            rows = evidence.rows.replace(rollout_logprobs=logprobs)
            blamed = culprits("counted_padding", _with_rows(evidence, rows))
            assert blamed == ([f"callback rows.{method}"] if found else [])


def _with_rows(evidence: Any, rows: Any) -> Any:
    return replace(evidence, rollout=rows, groups=rows, rows=rows)


@pytest.mark.parametrize(
    "callback",
    [
        OPSM(0.01),
        OPSM(0.3, against="rollout"),
        IcePop(),
        NoEOSMask(),
        OutlierMask(),
        SequenceRatioMask("geometric", 0.9, 1.1),
        TruncatedIS(),
    ],
    ids=lambda callback: callback.name,
)
def test_corrections_of_the_library_do_not_count_padding(callback: RLCallback) -> None:
    evidence = evidence_of(callback)
    rows = evidence.rows.replace(rollout_logprobs=evidence.rows.require("old_logprobs") - 0.1)
    evidence = _with_rows(evidence, rows)
    assert culprits("counted_padding", evidence) == []
