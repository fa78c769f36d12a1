"""The audit: invariants of the training signal, checked on live rollouts while a run trains."""

from lightning_rl.audit.audit import AuditError, SignalAudit
from lightning_rl.audit.checks import CHECKS
from lightning_rl.audit.ledger import SignalLedger
from lightning_rl.audit.recheck import recheck
from lightning_rl.testing.properties.check import Check
from lightning_rl.utils.finding import Finding

__all__ = ["CHECKS", "AuditError", "Check", "Finding", "SignalAudit", "SignalLedger", "recheck"]
