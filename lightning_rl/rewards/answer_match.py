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


def references_in(reference: Any) -> list[Any]:
    """Return the references that count for a row: the items of a list, or the reference itself."""
    return list(reference) if isinstance(reference, list | tuple) and reference else [reference]


@dataclass(frozen=True, kw_only=True)
class AnswerMatch(ABC):
    """Reward that scores each completion against a reference.

    A row with a list of references gets the highest of their values. A row whose reference is None gets None: the
    reward does not apply. A row whose references cannot be parsed gets NaN, is left out of training and is counted as
    failed; a warning shows the first such reference.

    Args:
        answer: Name of the column with the references.
        after: Marker such as ``"</think>"``: only the text after its last occurrence counts, and a completion without
            it scores 0. None counts the whole completion.
        tag: Name such as ``"answer"``: only the text in the last ``<answer>...</answer>`` counts, and a completion
            without it scores 0. None counts the whole completion.

    Raises:
        ValueError: If an option is invalid.
    """

    answer: str = "answer"
    after: str | None = None
    tag: str | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        check_text(answer=self.answer)
        check_text(optional=True, after=self.after, tag=self.tag)

    @property
    def columns_read(self) -> dict[str, str]:
        """Options by the columns that they name."""
        return {self.answer: "answer"}

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], *, completion_ids: Sequence[Any] = (), **columns: Any
    ) -> list[float | None]:
        """Return one value per completion."""
        parts = [self._part_of(text) for text in texts_of(completions)]
        values = self.compare([part or "" for part in parts], self.references_of(columns, len(parts)))
        return [
            0.0 if part is None and value is not None and value > 0 else value
            for part, value in zip(parts, values, strict=True)
        ]

    def references_of(self, columns: dict[str, Any], rows: int) -> Sequence[Any]:
        """Return the reference of each row."""
        return column_of(columns, self.answer, rows, option="answer", reward=self)

    def compare(self, texts: Sequence[str], references: Sequence[Any]) -> list[float | None]:
        """Return one value per text."""
        return score_rows(texts, references, self._best_score, column=self.answer, option="answer", reward=self)

    @abstractmethod
    def score(self, text: str, reference: Any) -> float:
        """Return the value of one completion against one reference.

        Raises:
            UnreadableReference: If the reference cannot be parsed.
        """

    def _best_score(self, text: str, reference: Any) -> float:
        scores, unreadable = list[float](), list[UnreadableReference]()
        for one in references_in(reference):
            try:
                scores.append(self.score(text, one))
            except UnreadableReference as error:
                unreadable.append(error)
        if not scores:
            raise unreadable[0]
        return max(scores)

    def _part_of(self, text: str) -> str | None:
        """Return the part of a completion that counts; None if it has no such part."""
        if self.after is not None:
            _, present, text = text.rpartition(self.after)
            if not present:
                return None
        if self.tag is not None:
            before, closed, _ = text.rpartition(f"</{self.tag}>")
            _, opened, part = before.rpartition(f"<{self.tag}>")
            return part.strip() if opened and closed else None
        return text
