"""Importance ratios: a weight contains its declared ratio, and no policy counts twice."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.evidence import culprits, evidence_of
from kit.support import callback_of
from torch import Tensor

from lightning_rl import LossView, RLCallback
from lightning_rl.audit.evidence import Evidence
from lightning_rl.callbacks import OffPolicyIS, TruncatedIS
from lightning_rl.losses import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GSPO,
    SAPO,
    VESPO,
    ClippedSurrogate,
    PolicyLoss,
    Reinforce,
)


def step_of(loss: PolicyLoss, *callbacks: RLCallback) -> Evidence:
    """Return evidence of an update on rows with advantages of both signs."""
    evidence = evidence_of(*callbacks)
    rows = evidence.rows
    signs = torch.where(rows.sample_ids % 2 == 0, 1.0, -1.0)[:, None]
    advantages = torch.where(rows.valid_tokens, signs.expand(rows.valid_tokens.shape), 0.0)
    logprobs = torch.where(rows.valid_tokens, -1.0 - 0.1 * torch.arange(rows.width), 0.0)
    rows = rows.replace(advantages=advantages, old_logprobs=logprobs, rollout_logprobs=logprobs)
    algorithm = evidence.algorithm.replace(loss=loss)
    return replace(evidence, algorithm=algorithm, rollout=rows, groups=rows, rows=rows)


def weight(name: str, declared: Any, function: Callable[[LossView], Tensor]) -> RLCallback:
    callback = callback_of(name, token_weight=function)
    callback.ratio = declared
    return callback


def current(view: LossView) -> Tensor:
    return (view.logprobs.detach() - view.require("rollout_logprobs")).exp()


def old(view: LossView) -> Tensor:
    return (view.require("old_logprobs") - view.require("rollout_logprobs")).exp()


@pytest.mark.parametrize(
    ("callback", "wrong"),
    [
        (TruncatedIS(), False),
        (TruncatedIS("sequence"), False),
        (TruncatedIS("geometric"), False),
        (TruncatedIS(floor=0.5), False),
        (OffPolicyIS(), False),
        (weight("capped", ("old", "rollout"), lambda view: old(view).clamp(max=1.0)), False),
        (weight("by_length", None, lambda view: torch.ones_like(old(view)) / view.width), False),
        (weight("by_confidence", None, lambda view: view.logprobs.detach().exp()), False),
        (weight("both", ("current", "rollout"), lambda view: current(view) * old(view)), True),
    ],
    ids=lambda value: value.name if isinstance(value, RLCallback) else "",
)
def test_a_weight_carries_the_ratio_that_it_declares(callback: RLCallback, wrong: bool) -> None:
    found = culprits("declared_ratio", step_of(Reinforce(), callback))
    assert found == ([f"callback {callback.name}.token_weight"] if wrong else [])


LOSSES = [ClippedSurrogate(), Reinforce(), CISPO(), DPPO(), DRO(), GMPO(), GSPO(), SAPO(), VESPO()]
LOSSES += [DRO(beta=5.0), VESPO(k_positive=6.0, lambda_positive=0.5)]


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_every_loss_carries_its_ratio_once_with_its_weight(loss: PolicyLoss) -> None:
    callback = OffPolicyIS() if isinstance(loss, Reinforce) else TruncatedIS()
    assert culprits("joint_ratio", step_of(loss, callback)) == []
