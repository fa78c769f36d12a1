"""AnswerMatch: what the rewards share that compare each completion with a reference out of a column."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rl.arguments import check_text
from lightning_rl.rewards.text import column_of, texts_of


class UnreadableReference(ValueError):  # noqa: N818
    """A reference that a reward cannot compare with anything: the data are at fault, no completion is."""


def score_rows(
    texts: Sequence[Any],
    references: Sequence[Any],
    score: Callable[[Any, Any], float | None],
    *,
    column: str,
    option: str,
    reward: object,
) -> list[float | None]:
    """A value for each text: None where the reference is, NaN where it cannot be read, of which a warning shows one.

    Args:
        texts: of the completions, or what else of them is compared.
        references: what each is compared with.
        score: of one text with its reference; raises :class:`UnreadableReference`.
        column: that holds the references.
        option: that names the column.
        reward: whose option it is.
    """
    values: list[float | None] = []
    unreadable: list[UnreadableReference] = []
    for text, reference in zip(texts, references, strict=True):
        try:
            value = None if reference is None else score(text, reference)
            values.append(None if value is None else float(value))
        except UnreadableReference as error:
            unreadable.append(error)
            values.append(math.nan)
    warn_of_unreadable(unreadable, column=column, option=option, reward=reward)
    return values


def warn_of_unreadable(unreadable: Sequence[UnreadableReference], *, column: str, option: str, reward: object) -> None:
    """Shows the first of the references that nothing can be compared with."""
    if unreadable:
        warnings.warn(
            f"{type(reward).__name__} cannot read {len(unreadable)} of its references, whose rows get no reward: "
            f"{unreadable[0]}: clean the column {column!r}, or name another one by {option}=",
            stacklevel=4,
        )


@dataclass(frozen=True, kw_only=True)
class AnswerMatch(ABC):
    """Scores the text of a completion against a reference, row by row.

    A row whose reference is None gets None: the reward does not apply to it. A row whose reference cannot be read gets
    NaN, which takes it out of training and is counted as failed, and the first of them is shown in a warning.

    Args:
        answer: the column that holds the references.

    Raises:
        ValueError: if an option is none of what it may be.
    """

    answer: str = "answer"

    def __post_init__(self) -> None:
        """Checks the options."""
        check_text(answer=self.answer)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], *, completion_ids: Sequence[Any] = (), **columns: Any
    ) -> list[float | None]:
        """A value for each completion, by the contract of rewards."""
        texts = texts_of(completions)
        return self.compare(texts, column_of(columns, self.answer, len(texts), option="answer", reward=self))

    def compare(self, texts: Sequence[str], references: Sequence[Any]) -> list[float | None]:
        """A value for each text."""
        return score_rows(texts, references, self.score, column=self.answer, option="answer", reward=self)

    @abstractmethod
    def score(self, text: str, reference: Any) -> float:
        """The value of one completion.

        Raises:
            UnreadableReference: if the reference is none that this reward can compare with.
        """
