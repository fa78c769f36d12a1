"""AnswerMatch: what the rewards share that compare each completion with a reference out of a column."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rl.rewards.text import column_of, text_of


class UnreadableReference(ValueError):  # noqa: N818
    """A reference that a reward cannot compare with anything: the data are at fault, no completion is."""


@dataclass(frozen=True, kw_only=True)
class AnswerMatch(ABC):
    """Scores the text of a completion against a reference, row by row.

    A row whose reference is None gets None: the reward does not apply to it. A row whose reference cannot be read gets
    NaN, which takes it out of training and is counted as failed, and the first of them is shown in a warning.

    Args:
        answer: the column that holds the references.
    """

    answer: str = "answer"

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], *, completion_ids: Sequence[Any] = (), **columns: Any
    ) -> list[float | None]:
        """A value for each completion, by the contract of rewards."""
        references = column_of(columns, self.answer, option="answer", reward=self)
        return self.compare([text_of(completion) for completion in completions], references)

    def compare(self, texts: Sequence[str], references: Sequence[Any]) -> list[float | None]:
        """A value for each text."""
        values: list[float | None] = []
        unreadable: list[UnreadableReference] = []
        for text, reference in zip(texts, references, strict=True):
            try:
                values.append(None if reference is None else float(self.score(text, reference)))
            except UnreadableReference as error:
                unreadable.append(error)
                values.append(math.nan)
        self.warn(unreadable)
        return values

    def warn(self, unreadable: Sequence[UnreadableReference]) -> None:
        """Shows the first of the references that nothing can be compared with."""
        if unreadable:
            warnings.warn(
                f"{type(self).__name__} cannot read {len(unreadable)} of its references, whose rows get no reward: "
                f"{unreadable[0]}: clean the column {self.answer!r}, or name another one by answer=",
                stacklevel=4,
            )

    @abstractmethod
    def score(self, text: str, reference: Any) -> float:
        """The value of one completion.

        Raises:
            UnreadableReference: if the reference is none that this reward can compare with.
        """
