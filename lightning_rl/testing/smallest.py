"""Smallest: the simplest example for which a property is broken, and how that is said."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import HealthCheck, find, settings
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import SearchStrategy

from lightning_rl.audit import CHECKS, Finding

Example = TypeVar("Example")
EXAMPLES = 20
HOW = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
)


class PropertyError(AssertionError):
    """What a ``check_...`` function raises.

    Args:
        what: is checked.
        finding: about the smallest batch.
        batch: one line for each row.
        meaning: of the property.

    Attributes:
        property: name of the broken property, that of a check of the audit where it has one.
        finding: about the smallest batch.
    """

    def __init__(self, what: str, finding: Finding, batch: Sequence[str], meaning: str = "") -> None:
        self.property, self.finding = finding.check, finding
        lines = [
            f"{what} breaks the property {finding.check}.",
            meaning or CHECKS[finding.check].meaning,
            f"Expected {finding.expected}, observed {finding.observed} ({finding.culprit}).",
            "The smallest batch that shows it:",
            *(f"  {line}" for line in batch),
            *([f"At positions {list(finding.positions)}."] if finding.positions else []),
            f"What to do: {finding.cure}.",
        ]
        super().__init__("\n".join(lines))


def smallest(
    strategy: SearchStrategy[Example], look: Callable[[Example, str | None], list[Finding]]
) -> tuple[Example, Finding] | None:
    """The simplest example with a finding, and the finding; None if there is none among so many examples.

    The same examples are tried every time. What shrinks is one property: that which was broken first.

    Args:
        strategy: of examples.
        look: findings about an example, of all properties or of the one that is named.
    """
    wanted: list[str] = []

    def breaks(example: Example) -> bool:
        findings = look(example, wanted[0] if wanted else None)
        if findings and not wanted:
            wanted.append(findings[0].check)
        return bool(findings)

    try:
        example = find(strategy, breaks, settings=HOW)
    except NoSuchExample:
        return None
    return example, look(example, wanted[0])[0]
