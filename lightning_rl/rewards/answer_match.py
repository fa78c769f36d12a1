"""Base class of the rewards that compare a completion with a reference answer."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rl.rewards.text import column_of, texts_of
from lightning_rl.utils.arguments import check_text


class UnreadableReference(ValueError):  # noqa: N818
    """A reference that a reward cannot parse; the data are at fault, not the completion."""


def score_rows(
    texts: Sequence[Any],
    references: Sequence[Any],
    score: Callable[[Any, Any], float | None],
    *,
    column: str,
    option: str,
    reward: object,
) -> list[float | None]:
    """Return one value per text: None where the reference is None, NaN where it cannot be parsed.

    Warns of the references that cannot be parsed.

    Args:
        texts: Values to compare, such as the texts of the completions.
        references: Reference of each text.
        score: Function of a text and its reference; raises :class:`UnreadableReference`.
        column: Name of the column with the references.
        option: Option of the reward that names the column.
        reward: Reward that the warning names.
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
    """Warn of the number of unreadable references and show the first."""
    if unreadable:
        warnings.warn(
            f"{type(reward).__name__} cannot read {len(unreadable)} of its references, whose rows get no reward: "
            f"{unreadable[0]}: clean the column {column!r}, or name another column with {option}=",
            stacklevel=4,
        )


@dataclass(frozen=True, kw_only=True)
class AnswerMatch(ABC):
    """Reward that scores each completion against a reference.

    A row whose reference is None gets None: the reward does not apply. A row whose reference cannot be parsed gets NaN,
    is left out of training and is counted as failed; a warning shows the first such reference.

    Args:
        answer: Name of the column with the references.

    Raises:
        ValueError: If an option is invalid.
    """

    answer: str = "answer"

    def __post_init__(self) -> None:
        """Check the options."""
        check_text(answer=self.answer)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], *, completion_ids: Sequence[Any] = (), **columns: Any
    ) -> list[float | None]:
        """Return one value per completion."""
        texts = texts_of(completions)
        return self.compare(texts, column_of(columns, self.answer, len(texts), option="answer", reward=self))

    def compare(self, texts: Sequence[str], references: Sequence[Any]) -> list[float | None]:
        """Return one value per text."""
        return score_rows(texts, references, self.score, column=self.answer, option="answer", reward=self)

    @abstractmethod
    def score(self, text: str, reference: Any) -> float:
        """Return the value of one completion.

        Raises:
            UnreadableReference: If the reference cannot be parsed.
        """
