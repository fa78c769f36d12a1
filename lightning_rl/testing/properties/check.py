"""Checks: functions from a case to findings, with a name, a description and default texts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

from lightning_rl.advantages import Estimator
from lightning_rl.corrections import REWARDS, Corrections, RLCallback
from lightning_rl.losses import PolicyLoss
from lightning_rl.testing.properties.case import AlgorithmCase, CorrectionMethod
from lightning_rl.testing.properties.comparisons import Skip
from lightning_rl.testing.properties.copies import CopyError
from lightning_rl.utils.finding import Finding

ESTIMATOR = "estimator {estimator}"
CaseT = TypeVar("CaseT", bound=AlgorithmCase, contravariant=True)


class Verdict(NamedTuple):
    """Result of checks on the same case.

    Attributes:
        findings: Violations.
        skipped: Reason why a check was skipped, in whole or in part, by name.
    """

    findings: list[Finding]
    skipped: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(Generic[CaseT]):
    """A named invariant.

    Attributes:
        name: Name for ``checks=`` and in findings.
        meaning: Description of the invariant.
        function: Function that yields violations.
        shared: Default texts of its findings.
        of_step: True if it inspects an optimizer step instead of the finished rollout.
        of_rows: True if a finding without samples applies to the first checked rows.
    """

    name: str
    meaning: str
    function: Callable[[CaseT], Iterable[Finding | Skip]]
    shared: Finding
    of_step: bool = False
    of_rows: bool = True

    def __call__(self, case: CaseT) -> list[Finding]:
        """Return the violations, including exceptions of stages on changed copies."""
        return self.judge(case).findings

    def violations(self, case: CaseT) -> list[Finding]:
        """Return the violations; raise the exceptions of stages."""
        return [self._complete(part, case) for part in self.function(case) if isinstance(part, Finding)]

    def judge(self, case: CaseT) -> Verdict:
        """Return the violations, and the reasons for skipping."""
        if case.is_empty:
            return Verdict([], {self.name: "the rollout has no rows"})
        try:
            results = list(self.function(case))
        except CopyError as error:
            return Verdict([], {self.name: str(error)})
        except Exception as raised:  # noqa: BLE001  an exception of user code on a changed copy is the finding
            expected, cure = (
                "stages that accept a changed copy of the rows",
                "carry every field to every row, padding included",
            )
            if isinstance(raised, KeyError) and raised.args and (name := raised.args[0]) not in _extras(case):
                expected = f'"{name}" among its reads or records'
                cure = f'declare it: records = ("{name}",) if the engine records it, else in reads or reads_at_loss'
            observed = f"{type(raised).__name__}: {raised}"
            finding = Finding(
                check=self.name, culprit=raiser_of(raised), expected=expected, observed=observed, cure=cure
            )
            return Verdict([finding], {})
        skips = dict.fromkeys(part.why for part in results if isinstance(part, Skip))
        findings = [self._complete(part, case) for part in results if isinstance(part, Finding)]
        return Verdict(findings, {self.name: ", and ".join(skips)} if skips else {})

    def _complete(self, finding: Finding, case: CaseT) -> Finding:
        if finding.check:
            return finding  # completed by a watch
        texts = {spec.name: getattr(finding, spec.name) or getattr(self.shared, spec.name) for spec in fields(Finding)}
        texts["culprit"] = finding.culprit or self.shared.culprit.format(**case.names)
        if texts["culprit"] == ESTIMATOR.format(**case.names) and (cause := self._cause(case)) is not None:
            texts["culprit"] = str(cause)
            texts["cure"] = f"correct {cause.method}, since the estimator alone has this property"
        if self.of_rows and not texts["samples"]:
            texts["samples"] = case.inspected_rows(of_step=self.of_step).sample_ids[:2].tolist()
        return Finding(**texts)

    def _cause(self, case: CaseT) -> CorrectionMethod | None:
        """Return the correction of rewards that breaks an estimator's property alone, if the estimator has it."""
        contributions = case.contributions(*REWARDS)
        if not contributions or self._fails(case, []):
            return None
        return next((one for one in contributions if self._fails(case, [one.callback])), None)

    def _fails(self, case: CaseT, callbacks: list[RLCallback]) -> bool:
        """Return True if the check yields a finding with these corrections alone, or cannot run."""
        try:
            corrections = type(case.algorithm.corrections)(callbacks)
            alone = replace(case, algorithm=case.algorithm.replace(corrections=corrections))
            return any(isinstance(part, Finding) for part in self.function(alone))
        except Exception:  # noqa: BLE001  of user code
            return True


def _extras(case: AlgorithmCase) -> set[str]:
    return {*case.rollout.extras, *case.rollout.token_extras, *case.rollout.prompt_extras}


def checks_in(*modules: ModuleType) -> dict[str, Check[Any]]:
    """Return the checks that modules define, by name."""
    return {one.name: one for module in modules for one in vars(module).values() if isinstance(one, Check)}


def run_checks(checks: Iterable[Check[CaseT]], case: CaseT) -> list[Finding]:
    """Return the findings of checks on this rank only, since other ranks may check more or fewer rows."""
    return judge(checks, case).findings


def judge(checks: Iterable[Check[CaseT]], case: CaseT) -> Verdict:
    """Return the findings of checks, and the reasons of skipped ones."""
    findings, skipped = list[Finding](), dict[str, str]()
    for check in checks:
        verdict = check.judge(case)
        findings += verdict.findings
        skipped |= verdict.skipped
    return Verdict(findings, skipped)


def raiser_of(raised: BaseException) -> str:
    """Return the innermost part of the algorithm in the traceback, as a culprit."""
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
) -> Callable[[Callable[[CaseT], Iterable[Finding | Skip]]], Check[CaseT]]:
    """Make a :class:`Check` of a function; its name becomes the check's, its docstring the description.

    The function yields a :class:`~lightning_rl.testing.properties.comparisons.Skip` if it cannot check something.

    Args:
        cure: Advice.
        culprit: Cause; ``{estimator}``, ``{loss}``, ``{reduction}`` and ``{engine}`` are replaced by names.
        expected: Expected value.
        observed: Observed value.
        of_step: True if it inspects an optimizer step.
        of_rows: True if a finding without samples applies to the first checked rows.
    """

    def register(function: Callable[[CaseT], Iterable[Finding | Skip]]) -> Check[CaseT]:
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
