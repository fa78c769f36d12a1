"""The audit compares corrections of the library with the formulas of their docstrings."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kit.support import fit, tiny_module, tiny_policy, tiny_tokenizer
from torch.optim import AdamW

import lightning_rl.algorithm
from lightning_rl import PromptDataModule, RLCallback
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import (
    OPSM,
    DynamicSampling,
    IcePop,
    NoEOSMask,
    OffPolicyIS,
    OutlierMask,
    OverlongPenalty,
    ReferenceKL,
    RolloutKL,
    SequenceRatioMask,
    TruncatedIS,
)
from lightning_rl.corrections import LossTerm, LossView

KEEP, TERM, TIMES = DynamicSampling.keep_groups, ReferenceKL.loss_term, lightning_rl.algorithm._times  # noqa: SLF001
PENALTY, PROVIDE = OverlongPenalty.reward_bonus, TruncatedIS.provide
CHECKS = ["correction_formula", "terms_add_up"]


def towards_old(one: ReferenceKL, view: LossView) -> LossTerm:
    return TERM(one, view.replace(ref_logprobs=view.old_logprobs))


def inverse(one: TruncatedIS, rollout: Any) -> dict[str, Any]:
    return {name: 1 / tensor for name, tensor in PROVIDE(one, rollout).items()}


WRONG = [
    (OPSM(1e-3), patch.object(OPSM, "sequence_mask", lambda _one, view: view.require("advantages").amax(-1) <= 0)),
    (TruncatedIS(normalized=True), patch.object(TruncatedIS, "provide", inverse)),
    (ReferenceKL(0.1, as_loss=True), patch.object(ReferenceKL, "loss_term", towards_old)),
    (
        OverlongPenalty(8, 4),
        patch.object(OverlongPenalty, "reward_bonus", lambda one, rollout: PENALTY(one, rollout) - 0.25),
    ),
    (DynamicSampling(max_rounds=2), patch.object(DynamicSampling, "keep_groups", lambda *_: torch.ones(16) > 0)),
    (NoEOSMask(), patch.object(NoEOSMask, "reward_mask", lambda _one, rollout: rollout.real)),
    (TruncatedIS(), patch.object(lightning_rl.algorithm, "_times", lambda *three: TIMES(*three) * three[1])),
]
CLEAN = [
    *(OffPolicyIS(), IcePop(), OutlierMask(low=0.9), RolloutKL(), RolloutKL(estimator="binary_kl"), OPSM()),
    *(SequenceRatioMask("geometric"), SequenceRatioMask("product"), SequenceRatioMask("max", 0.5, 3.0)),
    *(TruncatedIS("sequence"), TruncatedIS("geometric", floor=0.5), TruncatedIS("sequence", normalized=True)),
    *(ReferenceKL(0.1, as_loss=True, unbiased=True), ReferenceKL(0.1, as_loss=True, estimator="k2")),
]


def findings_with(callback: RLCallback, seed: int = 0) -> list[Any]:
    torch.manual_seed(seed)
    audit, rows = SignalAudit(1, checks=CHECKS), [f"a b c {place}" for place in range(16)]
    options: dict[str, Any] = {"loss": "reinforce"} if isinstance(callback, OffPolicyIS) else {}
    module = tiny_module(
        policy=tiny_policy, tokenizer=tiny_tokenizer(), optimizer=partial(AdamW, lr=0.05), group_size=4, **options
    )
    fit(module, callbacks=[callback, audit], data=PromptDataModule(rows, 4), max_steps=2)
    return audit.findings


@pytest.mark.parametrize(("callback", "wrong"), WRONG, ids=[str(place) for place in range(len(WRONG))])
@pytest.mark.filterwarnings("ignore:.*")
def test_a_wrong_correction_of_the_library_is_found(callback: RLCallback, wrong: Any) -> None:
    assert findings_with(callback) == []
    with wrong:
        assert findings_with(callback)


@pytest.mark.parametrize("callback", CLEAN, ids=lambda one: f"{one.name}")
@pytest.mark.filterwarnings("ignore:.*")
def test_a_correction_of_the_library_has_its_formula(callback: RLCallback) -> None:
    assert findings_with(callback) == []
