"""The checks of the audit, one file for each part of the signal."""

from lightning_rl.audit.checks import (
    contribution_checks,
    conversation_checks,
    correction_checks,
    definition_checks,
    draw_checks,
    formula_checks,
    hyperparameter_checks,
    logprob_checks,
    loss_checks,
    loss_term_checks,
    metric_checks,
    parent_checks,
    ratio_checks,
    return_checks,
    reward_checks,
    sampling_checks,
    signal_checks,
    stage_checks,
    step_checks,
)
from lightning_rl.audit.checks.check import Check, Verdict, check, judge, run_checks

GENERATED = (sampling_checks, draw_checks, conversation_checks, reward_checks, stage_checks)
MODULES = (
    *GENERATED,
    logprob_checks,
    signal_checks,
    definition_checks,
    return_checks,
    correction_checks,
    contribution_checks,
    loss_checks,
    loss_term_checks,
    formula_checks,
    ratio_checks,
    hyperparameter_checks,
    parent_checks,
    metric_checks,
    step_checks,
)
CHECKS = {value.name: value for module in MODULES for value in vars(module).values() if isinstance(value, Check)}
"""All checks by name, in the order of the stages of a rollout."""

__all__ = ["CHECKS", "Check", "Verdict", "check", "judge", "run_checks"]
