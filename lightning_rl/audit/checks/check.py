"""Check: a small function from evidence to findings, with a name, what it means and what its findings share."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

from lightning_rl.advantages import Estimator
from lightning_rl.audit.audit_error import Skip
from lightning_rl.audit.evidence import Evidence
from lightning_rl.corrections import Corrections, RLCallback
from lightning_rl.losses import PolicyLoss
from lightning_rl.utils.finding import Finding

CheckFunction = Callable[[Evidence], Iterable[Finding | Skip]]


class Verdict(NamedTuple):
    """What one check or several say of the same evidence.

    Attributes:
        findings: the violations.
        skipped: by name of a check, why it could not look at all that it should have looked at.
    """

    findings: list[Finding]
    skipped: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A named invariant.

    Attributes:
        name: for ``checks=`` and in findings.
        meaning: what must hold, and why.
        function: looks for violations.
        shared: what its findings say where they say nothing else.
        of_step: whether it looks at an optimizer step, and not at the finished rollout.
        of_rows: whether a finding without samples is about the first rows that were looked at.
    """

    name: str
    meaning: str
    function: CheckFunction
    shared: Finding
    of_step: bool = False
    of_rows: bool = True

    def __call__(self, evidence: Evidence) -> list[Finding]:
        """The violations; what a stage of the run raises on a changed copy is one too."""
        return self.judge(evidence).findings

    def judge(self, evidence: Evidence) -> Verdict:
        """The violations, and why it could not look where it should have."""
        if not evidence.edits and not len(evidence.rollout):
            return Verdict([], {self.name: "the rollout has no rows"})
        try:
            said = list(self.function(evidence))
        except Exception as raised:  # noqa: BLE001  user code ran on a copy of its rows: what it raises is the finding
            finding = Finding(
                check=self.name,
                culprit=_raiser(raised),
                expected="the stages of the run to take a changed copy of its rows",
                observed=f"{type(raised).__name__}: {raised}",
                cure="carry every field to every row, padding included",
            )
            return Verdict([finding], {})
        skips = dict.fromkeys(part.why for part in said if isinstance(part, Skip))
        findings = [self._complete(part, evidence) for part in said if isinstance(part, Finding)]
        return Verdict(findings, {self.name: ", and ".join(skips)} if skips else {})

    def _complete(self, finding: Finding, evidence: Evidence) -> Finding:
        if finding.check:
            return finding  # made while the run was watched
        said = {spec.name: getattr(finding, spec.name) or getattr(self.shared, spec.name) for spec in fields(Finding)}
        said["culprit"] = finding.culprit or self.shared.culprit.format(**evidence.names)
        if self.of_rows and not said["samples"]:
            rows = evidence.step.rows if self.of_step and evidence.step is not None else evidence.rows
            said["samples"] = rows.sample_ids[:2].tolist()
        return Finding(**said)


def run_checks(checks: Iterable[Check], evidence: Evidence) -> list[Finding]:
    """The findings of some checks, on this rank alone: other ranks may look at more or fewer rows."""
    return judge(checks, evidence).findings


def judge(checks: Iterable[Check], evidence: Evidence) -> Verdict:
    """The findings of some checks, and those of them that could not look, with the reason."""
    findings, skipped = list[Finding](), dict[str, str]()
    for check in checks:
        verdict = check.judge(evidence)
        findings += verdict.findings
        skipped |= verdict.skipped
    return Verdict(findings, skipped)


def _raiser(raised: BaseException) -> str:
    """Whose code was running, or whose contribution was refused: the innermost part of the algorithm on the way."""
    culprit, trace = "a stage of the run", raised.__traceback__
    while trace is not None:
        known, method = trace.tb_frame.f_locals, trace.tb_frame.f_code.co_name
        part = known.get("self")
        if isinstance(part, RLCallback):
            culprit = f"callback {part.name}.{method}"
        elif isinstance(part, PolicyLoss):
            culprit = f"loss {type(part).__name__}"
        elif isinstance(part, Estimator):
            culprit = f"estimator {part.name}"
        elif isinstance(part, Corrections) and isinstance(known.get("callback"), RLCallback):
            culprit = f"callback {known['callback'].name}.{known.get('method', method)}"
        elif method == "_check" and isinstance(known.get("callback"), RLCallback):
            culprit = f"callback {known['callback'].name}.{known.get('method', '')}"
        trace = trace.tb_next
    return culprit


def check(
    *,
    cure: str,
    culprit: str = "",
    expected: str = "",
    observed: str = "others",
    of_step: bool = False,
    of_rows: bool = True,
) -> Callable[[CheckFunction], Check]:
    """Makes a check of a function, whose name is its name and whose docstring says what the invariant means.

    The function yields a :class:`~lightning_rl.audit.audit_error.Skip` wherever it cannot look: it never returns early
    without a word.

    Args:
        cure: what to do about it.
        culprit: who caused it; ``{estimator}``, ``{loss}``, ``{reduction}`` and ``{engine}`` stand for their names.
        expected: what the invariant demands.
        observed: what was there instead.
        of_step: whether it looks at an optimizer step.
        of_rows: whether a finding without samples is about the first rows that were looked at.
    """

    def register(function: CheckFunction) -> Check:
        name = getattr(function, "__name__", "")
        return Check(
            name=name,
            meaning=" ".join((function.__doc__ or "").split()),
            function=function,
            shared=Finding(check=name, culprit=culprit, expected=expected, observed=observed, cure=cure),
            of_step=of_step,
            of_rows=of_rows,
        )

    return register
