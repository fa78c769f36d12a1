"""The audit recomputes code of the library with its own formulas: a wrong function is wrong in the run alone."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kit.support import fit, tiny_module, tiny_policy, tiny_tokenizer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim import AdamW

import lightning_rl.corrections.stat
import lightning_rl.rollouts.estimate_signal
from lightning_rl import GAE, PromptDataModule
from lightning_rl.advantages import LengthAdaptive
from lightning_rl.audit import SignalAudit
from lightning_rl.data import Encoder
from lightning_rl.rollouts.collector import Collector

TEXTS, TOKENIZE = Collector.texts, Encoder._tokenize  # noqa: SLF001


def score_at_the_first_token(scores: Tensor, token_rewards: Any, valid: Tensor, *_: Any) -> Tensor:
    first = valid & (valid.cumsum(-1) == 1)
    return torch.where(first, scores[:, None], 0.0) + (0.0 if token_rewards is None else token_rewards * valid)


def long_decay(_decay: LengthAdaptive, steps: Tensor) -> Tensor:
    return (1 - 1 / (2.0 * steps.clamp(min=1))).clamp(min=0)


def without_the_last(collector: Collector, rows: Any) -> list[str]:
    return TEXTS(collector, [row[:-1] for row in rows])


def shortened(encoder: Encoder, texts: Any, names: Any, **options: Any) -> Any:
    return {place: ids[:-1] for place, ids in TOKENIZE(encoder, texts, names, **options).items()}


ADAPTIVE = {"advantages": GAE(lam=LengthAdaptive(alpha=0.5))}


@pytest.mark.parametrize(
    ("check", "options", "wrong"),
    [
        (
            "returns_end_with_the_reward",
            {"advantages": "gae"},
            patch.object(lightning_rl.rollouts.estimate_signal, "shaped_rewards", score_at_the_first_token),
        ),
        ("token_returns", ADAPTIVE, patch.object(LengthAdaptive, "__call__", long_decay)),
        (
            "logged_metrics",
            {},
            patch.dict(lightning_rl.corrections.stat.FIGURES, {"std": lambda _n, _mean, squares, _top: squares}),
        ),
        ("reward_rows", {}, patch.object(Collector, "texts", without_the_last)),
        ("prompt_source", {}, patch.object(Encoder, "_tokenize", shortened)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("found", [True, False])
@pytest.mark.filterwarnings("ignore:.*the audit of rollout:UserWarning")
def test_a_wrong_function_of_the_library_is_found(check: str, options: Any, wrong: Any, found: bool) -> None:
    audit = SignalAudit(1, checks=[check])
    critic = {"critic": "shared"} if "advantages" in options else {}
    data = PromptDataModule([f"a b c {place}" for place in range(8)], 4)
    policy = {"policy": tiny_policy, "tokenizer": tiny_tokenizer(), "optimizer": partial(AdamW, lr=0.05)}
    with wrong if found else patch.dict({}):
        fit(
            tiny_module(**policy, **options, **critic), callbacks=[audit], data=data, max_steps=3, logger=CSVLogger(".")
        )
    assert {finding.check for finding in audit.findings} == ({check} if found else set()), audit.skipped


def minus_the_mean(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
    members = (groups[:, None] == groups) & rewarded
    return scores - torch.where(members, scores, 0.0).sum(-1) / members.sum(-1).clamp(min=1)


def zero_elsewhere(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
    return torch.where(rewarded, minus_the_mean(scores, groups, rewarded), 0.0)


@pytest.mark.parametrize(("advantages", "wrong"), [(minus_the_mean, True), (zero_elsewhere, False)])
@pytest.mark.filterwarnings("ignore:.*the audit of rollout:UserWarning")
def test_a_row_without_a_reward_has_no_advantage(advantages: Any, wrong: bool) -> None:
    audit, data = (
        SignalAudit(1, checks=["excluded_rows"]),
        PromptDataModule([f"a b c {place}" for place in range(8)], 4),
    )
    module = tiny_module(policy=tiny_policy, tokenizer=tiny_tokenizer(), group_size=4, advantages=advantages)
    fit(module, callbacks=[audit], data=data, max_steps=2)
    assert bool(audit.findings) is wrong
