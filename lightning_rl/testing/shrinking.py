"""Shrinking of a failing example, and the error that reports it."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import HealthCheck, find, settings
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import SearchStrategy

from lightning_rl.testing.properties import PROPERTIES
from lightning_rl.utils.finding import Finding

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
    """Error of the ``check_...`` functions.

    Args:
        what: Name of the checked object.
        finding: Finding about the smallest batch.
        batch: One line per row.
        meaning: Statement of the property.

    Attributes:
        property: Name of the broken property.
        finding: Finding about the smallest batch.
    """

    def __init__(self, what: str, finding: Finding, batch: Sequence[str], meaning: str = "") -> None:
        self.property, self.finding = finding.check, finding
        lines = [
            f"{what} breaks the property {finding.check}.",
            meaning or PROPERTIES[finding.check].meaning,
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
    """Return the simplest example with a finding, and the finding; None if no example has one.

    The examples are the same in each call. Shrinking keeps the property that broke first.

    Args:
        strategy: Strategy for examples.
        look: Returns findings about an example, for all properties or for the named one.
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
