"""Returns end with the reward of the last token or turn."""

import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.evidence import culprits, evidence_of
from kit.support import fit, tiny_module, tiny_prompts
from torch.optim import AdamW
from typing_extensions import override

from lightning_rl import GAE
from lightning_rl.advantages import (
    Advantages,
    Estimator,
    GAEOverTurns,
    LengthAdaptive,
    ReinforcePlusPlus,
    RelativePosition,
    RewardSignal,
)
from lightning_rl.audit import SignalAudit, recheck
from lightning_rl.audit.evidence import Evidence
from lightning_rl.callbacks import AdaptiveKL
from lightning_rl.signal.discounted_returns import gae
from lightning_rl.signal.masked import whiten


def trained_by(estimator: Estimator) -> Evidence:
    """Return evidence of a rollout with the signal of an estimator and values of a critic."""
    evidence = evidence_of()
    rollout = evidence.rollout
    values = torch.where(
        rollout.valid_tokens, torch.sin(1.0 + torch.arange(rollout.width) + rollout.sample_ids[:, None]), 0
    )
    turns = torch.where(rollout.action_mask, 1 + torch.arange(rollout.width) // 2, 0)
    rollout = rollout.replace(values=values, advantages=None, token_extras={**rollout.token_extras, "turns": turns})
    evidence = replace(evidence, algorithm=evidence.algorithm.replace(advantages=estimator))
    rollout = evidence.signal(rollout)[0]
    return replace(evidence, rollout=rollout, groups=rollout, rows=rollout)


@dataclass(frozen=True)
class Bootstrapped(GAE):
    """Adds the last value after the end."""

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        assert signal.values is not None
        last = signal.values.gather(1, (signal.valid_tokens.sum(-1, keepdim=True) - 1).clamp(min=0))[:, 0]
        assert isinstance(self.lam, float)
        raw = gae(signal.shaped, signal.values, signal.valid_tokens, gamma=self.gamma, lam=self.lam, bootstrap=last)
        return Advantages(whiten(raw, signal.valid_tokens), raw + signal.values * signal.valid_tokens)


@pytest.mark.parametrize(
    ("estimator", "found"),
    [
        (GAE(gamma=0.9, lam=0.8), []),
        (GAE(gamma=0.9, lam=RelativePosition(0.3), lam_critic=LengthAdaptive(0.4)), []),
        (GAEOverTurns(gamma=0.9, lam=0.8), []),
        (ReinforcePlusPlus(gamma=0.9), []),
        (Bootstrapped(gamma=0.9, lam=0.8), ["estimator Bootstrapped"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_returns_end_with_the_reward_of_the_last_token_or_turn(estimator: Any, found: list[str]) -> None:
    assert culprits("returns_end_with_the_reward", trained_by(estimator)) == found


def test_a_saved_rollout_is_judged_with_the_coefficient_of_then(tmp_path: Path) -> None:
    options: dict[str, Any] = {"advantages": Bootstrapped(), "critic": "shared", "optimizer": partial(AdamW, lr=0.02)}
    adaptive = partial(AdaptiveKL, 0.1, target=1e-3, horizon=16)
    audit = SignalAudit(1, checks=["returns_end_with_the_reward"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(tiny_module(**options), callbacks=[adaptive(), audit], data=tiny_prompts(12, 4), default_root_dir=tmp_path)
    path = tmp_path / "audit" / "rollout-2.pt"
    assert recheck(path, tiny_module(**options), [adaptive()]) == [audit.findings[-1]]
