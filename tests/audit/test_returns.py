"""Returns and advantages of tokens, against their definition."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kit.evidence import culprits, evidence_of
from typing_extensions import override

from lightning_rl import GAE
from lightning_rl.advantages import (
    Advantages,
    Estimator,
    GAEOverTurns,
    RewardSignal,
)
from lightning_rl.audit.evidence import Evidence
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
        (GAE(gamma=0.9, lam=0.8), False),
        (GAEOverTurns(gamma=0.9, lam=0.8), False),
        (Bootstrapped(gamma=0.9, lam=0.8), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_nothing_is_bootstrapped_past_the_end(estimator: Any, found: bool) -> None:
    named = culprits("returns_end_with_the_reward", trained_by(estimator))
    assert set(named) == ({f"estimator {estimator.name}"} if found else set())
