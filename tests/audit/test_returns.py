"""Returns and advantages of tokens, against their definition."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kit.evidence import culprits, evidence_of
from typing_extensions import override

from lightning_rl import GAE
from lightning_rl.advantages import (
    ESTIMATORS,
    Advantages,
    Estimator,
    GAEOverTurns,
    LengthAdaptive,
    ReinforcePlusPlus,
    RelativePosition,
    RewardSignal,
)
from lightning_rl.audit import CHECKS
from lightning_rl.audit.checks.return_checks import step_advantages, steps_of
from lightning_rl.audit.evidence import Evidence
from lightning_rl.rollout import segments_of
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
    segments = segments_of(turns, rollout.response_lengths)
    rollout = rollout.replace(values=values, advantages=None, segments=segments)
    evidence = replace(evidence, algorithm=evidence.algorithm.replace(advantages=estimator))
    rollout = evidence.signal(rollout)[0]
    return replace(evidence, rollout=rollout, groups=rollout, rows=rollout)


def test_the_definition_by_hand() -> None:
    """Gamma = lam = 1/2 on valid tokens 0 and 2: delta_2 = 4 - 2, delta_0 = 0 + 2/2 - 1, A_0 = 0 + 2/4."""
    valid = torch.tensor([[True, False, True, False]])
    rewards, values = torch.tensor([[0.0, 9.0, 4.0, 9.0]]), torch.tensor([[1.0, 7.0, 2.0, 7.0]])
    tokens = steps_of(valid, torch.tensor([[0, 1, 2, 3]]))
    advantages, at_steps = step_advantages(rewards, values, tokens, 0.5, [0.5])
    assert advantages.tolist() == [[0.5, 0.0, 2.0, 0.0]] and at_steps.tolist() == [[1.0, 0.0, 2.0, 0.0]]


def test_the_definition_over_turns_by_hand() -> None:
    """Gamma = lam = 1/2: delta_2 = 4 - 2, delta_1 = (1 + 3) + 2/2 - 1 of two tokens, A_1 = 4 + 2/4."""
    valid, turns = torch.tensor([[True, True, False, True]]), torch.tensor([[1, 1, 0, 2]])
    rewards, values = torch.tensor([[1.0, 3.0, 9.0, 4.0]]), torch.tensor([[1.0, 7.0, 7.0, 2.0]])
    advantages, at_steps = step_advantages(rewards, values, steps_of(valid, turns), 0.5, [0.5])
    assert advantages.tolist() == [[4.5, 4.5, 0.0, 2.0]] and at_steps.tolist() == [[1.0, 1.0, 0.0, 2.0]]


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


@dataclass(frozen=True)
class WhitenedByRow(GAE):
    """Whitens the batch and then every row."""

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        advantages, returns = super().__call__(signal)
        pairs = zip(advantages, signal.valid_tokens, strict=True)
        return Advantages(torch.cat([whiten(row[None], mask[None]) for row, mask in pairs]), returns)


@dataclass(frozen=True)
class FirstTurnTwice(GAEOverTurns):
    """Counts the tokens of the second turn as those of the first."""

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        assert signal.turns is not None
        return super().__call__(replace(signal, turns=torch.where(signal.turns == 2, 1, signal.turns)))


@dataclass(frozen=True)
class Doubled(GAE):
    """Doubles the advantages."""

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        advantages, returns = super().__call__(signal)
        return Advantages(advantages * 2, returns)


@pytest.mark.parametrize(
    ("estimator", "checks"),
    [
        (GAE(), []),
        (GAE(gamma=0.9, lam=0.8), []),
        (GAE(gamma=0.9, lam=0.8, whitened=False), []),
        (GAE(gamma=0.9, lam=RelativePosition(0.3), lam_critic=LengthAdaptive(0.4)), []),
        (GAEOverTurns(gamma=0.9, lam=0.8), []),
        (GAEOverTurns(gamma=0.9, lam=RelativePosition(0.3), whitened=False), []),
        (ReinforcePlusPlus(gamma=0.9), []),
        (FirstTurnTwice(gamma=0.9, whitened=False), ["token_returns"]),
        (Bootstrapped(gamma=0.9, lam=0.8), ["returns_end_with_the_reward", "token_returns"]),
        (WhitenedByRow(), ["token_returns"]),
        (Doubled(), ["token_returns"]),
        (Doubled(whitened=False), ["token_returns"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_trains_is_that_of_the_definition(estimator: Any, checks: list[str]) -> None:
    evidence = trained_by(estimator)
    found = {name: culprits(name, evidence) for name in ("returns_end_with_the_reward", "token_returns")}
    assert [name for name, named in found.items() if named] == checks
    assert {culprit for named in found.values() for culprit in named} <= {f"estimator {estimator.name}"}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_of_the_library_is_checked_or_named(name: str) -> None:
    estimator, evidence = ESTIMATORS[name], evidence_of()
    if name in ("gae", "gae_over_turns", "reinforce_plus_plus"):
        assert CHECKS["token_returns"].judge(trained_by(estimator)).skipped == {}
    else:
        evidence = replace(evidence, algorithm=evidence.algorithm.replace(advantages=estimator))
        reason = f"{estimator.name} is not GAE, GAEOverTurns or ReinforcePlusPlus"
        assert CHECKS["token_returns"].judge(evidence).skipped == {"token_returns": reason}
