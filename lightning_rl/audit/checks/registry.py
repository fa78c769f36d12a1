"""The register of checks: each a small function from evidence to findings, with a name and what it means."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.finding import Finding

CheckFunction = Callable[[Evidence], list[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """A named invariant.

    Attributes:
        name: for ``checks=`` and in findings.
        meaning: what must hold, and why.
        function: looks for violations.
        of_step: whether it looks at an optimizer step, and not at the finished rollout.
    """

    name: str
    meaning: str
    function: CheckFunction
    of_step: bool = False


CHECKS: dict[str, Check] = {}


def check(name: str, *, of_step: bool = False) -> Callable[[CheckFunction], CheckFunction]:
    """Registers a function under a name; its docstring says what the invariant means."""

    def register(function: CheckFunction) -> CheckFunction:
        CHECKS[name] = Check(name, " ".join((function.__doc__ or "").split()), function, of_step)
        return function

    return register
