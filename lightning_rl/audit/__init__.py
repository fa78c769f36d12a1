"""The audit: invariants of the training signal, checked on live rollouts while a run trains."""

from lightning_rl.audit import (
    draw_checks,
    fit_checks,
    knob_checks,
    loss_checks,
    metric_checks,
    reward_checks,
    score_checks,
    signal_checks,
    step_checks,
    term_checks,
)
from lightning_rl.audit.checks import CHECKS, Check
from lightning_rl.audit.finding import AuditError, Finding
from lightning_rl.audit.ledger import SignalLedger
from lightning_rl.audit.saved import recheck
from lightning_rl.audit.signal_audit import SignalAudit

REGISTERED = (  # importing them fills CHECKS
    draw_checks, reward_checks, score_checks, signal_checks, loss_checks, term_checks, fit_checks, knob_checks,
    metric_checks, step_checks,
)  # fmt: skip

__all__ = ["CHECKS", "AuditError", "Check", "Finding", "SignalAudit", "SignalLedger", "recheck"]
