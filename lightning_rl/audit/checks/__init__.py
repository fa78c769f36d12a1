"""The checks of the audit, one file for each part of the signal; importing them fills the registry."""

from lightning_rl.audit.checks import (
    contributions,
    knobs,
    logprobs,
    loss,
    metrics,
    rewards,
    sampling,
    signal,
    step,
    terms,
)
from lightning_rl.audit.checks.registry import CHECKS, Check, check

MODULES = (sampling, rewards, logprobs, signal, loss, terms, contributions, knobs, metrics, step)

__all__ = ["CHECKS", "MODULES", "Check", "check"]
