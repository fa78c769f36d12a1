"""Fault: something that goes wrong quietly, and what the audit has to say of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_rl import RLCallback


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong quietly.

    Attributes:
        name: what.
        check: the check that has to find it; of several, joined by ``|``, whichever comes first.
        culprit: what the finding's culprit has to contain.
        callbacks: corrections of the run, wrong ones among them.
        options: of the module.
        patches: what is replaced in the library while it runs.
    """

    name: str
    check: str
    culprit: str
    callbacks: Callable[[], list[RLCallback]] = list
    options: dict[str, Any] = field(default_factory=dict)
    patches: Sequence[Any] = ()

    def named_by(self, check: str, culprit: str) -> bool:
        """Whether a finding names the right check and the right culprit."""
        return check in self.check.split("|") and self.culprit in culprit
