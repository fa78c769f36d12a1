"""Run checks over evidence; whatever a stage raises on a changed copy is a finding too."""

from collections.abc import Iterable

from lightning_rl.audit.checks import Check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.corrections import RLCallback
from lightning_rl.finding import Finding
from lightning_rl.losses import PolicyLoss


def run_checks(checks: Iterable[Check], evidence: Evidence) -> list[Finding]:
    """The findings of some checks, on this rank alone: other ranks may look at more or fewer rows."""
    findings = list[Finding]()
    for check in checks:
        try:
            findings += check(evidence)
        except Exception as raised:  # noqa: BLE001  user code ran on a copy of its rows: what it raises is the finding
            findings.append(
                Finding(
                    check=check.name,
                    culprit=_raiser(raised),
                    expected="the stages of the run to take a changed copy of its rows",
                    observed=f"{type(raised).__name__}: {raised}",
                    cure="carry every field to every row, padding included",
                )
            )
    return findings


def _raiser(raised: BaseException) -> str:
    culprit, trace = "a stage of the run", raised.__traceback__
    while trace is not None:
        part = trace.tb_frame.f_locals.get("self")
        if isinstance(part, RLCallback):
            culprit = f"callback {part.name}.{trace.tb_frame.f_code.co_name}"
        elif isinstance(part, PolicyLoss):
            culprit = f"loss {type(part).__name__}"
        trace = trace.tb_next
    return culprit
