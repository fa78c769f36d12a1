"""Looking: checks run over evidence; whatever a stage raises on a changed copy is a finding too."""

from collections.abc import Iterable

from lightning_rl import distributed
from lightning_rl.audit.checks.registry import Check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.finding import Finding
from lightning_rl.corrections import RLCallback
from lightning_rl.losses import PolicyLoss


def looked(checks: Iterable[Check], evidence: Evidence) -> list[Finding]:
    """The findings of some checks, on this rank alone: other ranks may look at more or fewer rows."""
    with distributed.alone():
        return [finding for check in checks for finding in _found(check, evidence)]


def _found(check: Check, evidence: Evidence) -> list[Finding]:
    try:
        return check.function(evidence)
    except Exception as raised:  # noqa: BLE001  user code ran on a copy of its own rows: what it raises is the finding
        return [
            Finding(
                check=check.name, culprit=_who_raised(raised), observed=f"{type(raised).__name__}: {raised}",
                expected="the stages of the run to take a changed copy of its rows",
                cure="carry every field to every row, padding included",
            )
        ]  # fmt: skip


def _who_raised(raised: BaseException) -> str:
    culprit, trace = "a stage of the run", raised.__traceback__
    while trace is not None:
        own = trace.tb_frame.f_locals.get("self")
        if isinstance(own, RLCallback):
            culprit = f"callback {own.name}.{trace.tb_frame.f_code.co_name}"
        elif isinstance(own, PolicyLoss):
            culprit = f"loss {type(own).__name__}"
        trace = trace.tb_next
    return culprit
