"""The checks of the audit, one file for each part of the signal."""

from lightning_rl.audit.checks import (
    contributions,
    conversations,
    draws,
    knobs,
    logprobs,
    loss,
    metrics,
    ratios,
    returns,
    rewards,
    sampling,
    signal,
    stages,
    step,
    talks,
    terms,
)
from lightning_rl.audit.checks.check import Check, Verdict, check, judge, run_checks

GENERATED = (sampling, draws, conversations, talks, rewards, stages)
MODULES = (*GENERATED, logprobs, signal, returns, loss, terms, ratios, contributions, knobs, metrics, step)
CHECKS = {value.name: value for module in MODULES for value in vars(module).values() if isinstance(value, Check)}
"""Every check by its name, in the order in which a rollout is made."""

__all__ = ["CHECKS", "Check", "Verdict", "check", "judge", "run_checks"]
