"""Importance ratios: a weight contains its declared ratio, and no policy counts twice."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.evidence import culprits, evidence_of
from kit.support import callback_of
from torch import Tensor
from typing_extensions import override

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
from lightning_rl.losses.policy_loss import FunctionLoss


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
        (weight("root", ("old", "rollout"), lambda view: old(view).sqrt()), True),
        (weight("square", ("old", "rollout"), lambda view: old(view).square()), True),
        (weight("half", ("old", "rollout"), lambda view: old(view) / 2), True),
        (weight("product", ("old", "rollout"), lambda view: old(view).cumprod(-1)), True),
    ],
    ids=lambda value: value.name if isinstance(value, RLCallback) else "",
)
def test_a_weight_carries_the_ratio_that_it_declares(callback: RLCallback, wrong: bool) -> None:
    found = culprits("declared_ratio", step_of(Reinforce(), callback))
    assert found == ([f"callback {callback.name}.token_weight"] if wrong else [])


def up_to_each(view: LossView) -> Tensor:
    return ((view.logprobs - view.require("old_logprobs")) * view.valid_tokens).cumsum(-1).exp()


def root(view: LossView) -> Tensor:
    return ((view.logprobs - view.require("old_logprobs")) / 2).exp()


def of_response(view: LossView) -> Tensor:
    return (view.logprobs - view.require("old_logprobs")).mean(-1, keepdim=True).exp().expand_as(view.logprobs)


@pytest.mark.parametrize("subclass", [True, False])
@pytest.mark.parametrize(("ratio", "wrong"), [(up_to_each, True), (root, True), (of_response, False)])
def test_a_loss_has_a_ratio_of_tokens_or_responses(ratio: Any, wrong: bool, subclass: bool) -> None:
    class Own(ClippedSurrogate):
        @override
        def importance(self, view: LossView) -> Tensor:
            return ratio(view)

    loss = Own() if subclass else FunctionLoss(lambda view: -ratio(view) * view.require("advantages"))
    assert len(culprits("declared_ratio", step_of(loss))) == wrong


LOSSES = [ClippedSurrogate(), Reinforce(), CISPO(), DPPO(), DRO(), GMPO(), GSPO(), SAPO(), VESPO()]
LOSSES += [DRO(beta=5.0), VESPO(k_positive=6.0, lambda_positive=0.5)]


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_every_loss_carries_its_ratio_once_with_its_weight(loss: PolicyLoss) -> None:
    callback = OffPolicyIS() if isinstance(loss, Reinforce) else TruncatedIS()
    assert culprits("joint_ratio", step_of(loss, callback)) == []
