"""Clean runs of many configurations, drawn by number, each rollout audited by every check: no alarm."""

import random
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit, parity_reward, tiny_module, tiny_policy, tiny_prompts
from torch.optim import SGD, AdamW

from lightning_rl import GAE, Normalized, RLCallback, warmup_then_linear
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import (
    OPSM,
    DynamicSampling,
    EntropyBonus,
    IcePop,
    NoEOSMask,
    OutlierMask,
    OverlongPenalty,
    ReferenceKL,
    RewardNormalization,
    RolloutKL,
    SequenceRatioMask,
    TruncatedIS,
)
from lightning_rl.optimizers import fused_adamw

ROLLOUTS, LONG = 20, 2000


def sums(prompts: Any, completions: Any, *, completion_ids: Sequence[Any], scale: float = 1.0, **_: Any) -> list[float]:
    """A reward with many digits, of any scale."""
    return [scale * sum(ids) / (7.0 + len(ids)) / 3.0 for ids in completion_ids]


def sparse(prompts: Any, completions: Any, *, completion_ids: Sequence[Any], **_: Any) -> list[float | None]:
    """A reward that often does not apply."""
    return [None if len(ids) % 3 == 0 else len(ids) / 8 for ids in completion_ids]


REWARDS: list[Any] = [
    *(parity_reward, sums, sparse),
    *(partial(sums, scale=scale) for scale in (1e-3, 300.0)),
    {"a": (parity_reward, 0.7), "b": (sums, 0.3), "c": (sparse, 0.0)},
]
ESTIMATORS: list[Any] = [
    *("grpo", "dr_grpo", "rloo", "opo", "maxrl", "remax", "reinforce_plus_plus"),
    *(Normalized(mean="batch", std="batch"), Normalized(std="batch"), "gae", GAE(gamma=0.95, lam=0.9)),
]
LOSSES = ["ppo", "ppo", "reinforce", "gspo", "cispo", "dppo", "sapo", "gmpo", "m2po"]
REDUCTIONS = ["token_mean", "sequence_mean", "prompt_mean"]
OPTIMIZERS: list[Any] = [
    partial(AdamW, lr=1e-2),
    partial(fused_adamw, lr=1e-3, weight_decay=0.1),
    partial(SGD, lr=0.1, momentum=0.9),
    partial(torch.optim.RMSprop, lr=1e-3),
]


def drawn(number: int) -> tuple[dict[str, Any], list[RLCallback], str]:
    """Options, corrections and precision of the configuration of a number."""
    draw = random.Random(number)
    estimator, loss = draw.choice(ESTIMATORS), draw.choice(LOSSES)
    per_token = estimator == "reinforce_plus_plus" or isinstance(estimator, GAE) or estimator == "gae"
    options: dict[str, Any] = {
        "policy": partial(tiny_policy, number),
        "advantages": estimator,
        "loss": loss,
        "reduction": draw.choice(REDUCTIONS),
        "rewards": draw.choice(REWARDS),
        "optimizer": draw.choice(OPTIMIZERS),
        "minibatches_per_rollout": draw.choice([1, 2]),
        "epochs_per_rollout": 1 if loss == "reinforce" else draw.choice([1, 1, 2]),
        "max_tokens_per_microbatch": draw.choice([24, 60, 4096]),
        "packing": draw.random() < 0.7,
        "temperature": draw.choice([0.3, 0.7, 1.0, 1.3]),
        "top_k": draw.choice([0, 0, 6]),
        "max_grad_norm": draw.choice([1.0, 0.01, None]),
        "lr_scheduler": draw.choice([None, warmup_then_linear(3, 100)]),
        "group_size": draw.choice([3, 4, 6]),
        "max_idle_rollouts": None,
        "seed": number,
    }
    if loss == "reinforce":
        options["minibatches_per_rollout"] = 1
    if per_token and estimator != "reinforce_plus_plus":
        options["critic"] = draw.choice(["shared", partial(tiny_policy, 3)])
        if options["optimizer"] is OPTIMIZERS[2]:  # under which a critic's values leave float32 within ten rollouts
            options["max_grad_norm"] = options["max_grad_norm"] or 1.0
    legal: list[RLCallback] = [
        *(NoEOSMask(), NoEOSMask("drop_tokens"), OverlongPenalty(8, 4), EntropyBonus(0.01), OutlierMask()),
        *(
            OPSM(against="rollout"),
            SequenceRatioMask("geometric", 0.5, 2.0),
            ReferenceKL(0.05, as_loss=True),
            RolloutKL(),
        ),
    ]
    legal += [IcePop(), TruncatedIS()] if loss != "reinforce" else []
    legal += [RewardNormalization()] if per_token else [DynamicSampling(max_rounds=2)]
    chosen = {one.name: one for one in draw.sample(legal, draw.choice([0, 1, 3]))}
    return options, list(chosen.values()), draw.choice(["32-true", "32-true", "bf16-mixed"])


def alarms(number: int, rollouts: int, folder: Path) -> list[str]:
    """What the audit says of a clean run."""
    (options, corrections, precision), audit = drawn(number), SignalAudit(1)
    options = {name: value for name, value in options.items() if name != "top_k" or value}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = [*corrections, audit]
        data = tiny_prompts(4 * rollouts, 4)
        fit(tiny_module(**options), callbacks=callbacks, data=data, default_root_dir=folder, precision=precision)
    assert audit.seconds > 0
    return [f"configuration {number}: {finding}" for finding in audit.findings]


@pytest.mark.parametrize("number", range(4))
def test_no_alarm_in_a_few_clean_configurations(number: int, tmp_path: Path) -> None:
    assert alarms(number, 2, tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize("number", range(100, 100 + LONG // ROLLOUTS))
def test_no_alarm_in_two_thousand_clean_rollouts(number: int, tmp_path: Path) -> None:
    assert alarms(number, ROLLOUTS, tmp_path) == []
