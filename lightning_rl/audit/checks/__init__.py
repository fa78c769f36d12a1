"""The checks of the audit, one file for each part of the signal."""

from lightning_rl.audit.checks import (
    conversation_checks,
    correction_checks,
    definition_checks,
    draw_checks,
    logprob_checks,
    parent_checks,
    return_checks,
    reward_checks,
    sampling_checks,
    stage_checks,
    step_checks,
)
from lightning_rl.audit.evidence import Evidence
from lightning_rl.testing.properties import (
    contribution_checks,
    formula_checks,
    hyperparameter_checks,
    loss_checks,
    loss_term_checks,
    metric_checks,
    ratio_checks,
    signal_checks,
)
from lightning_rl.testing.properties.check import Check, checks_in

CHECKS: dict[str, Check[Evidence]] = checks_in(
    sampling_checks,
    draw_checks,
    conversation_checks,
    reward_checks,
    stage_checks,
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
"""All checks by name, in the order of the stages of a rollout."""

__all__ = ["CHECKS"]
