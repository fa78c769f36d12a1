"""Reward for a regular expression that a completion matches."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any

import regex

from lightning_rl.rewards.answer_match import UnreadableReference, score_rows
from lightning_rl.rewards.text import column_of, texts_of
from lightning_rl.utils.arguments import check_text

TIMEOUT = 1.0  # seconds for one completion


@dataclass(frozen=True, kw_only=True)
class RegexMatch:
    """Regex reward: 1 if a pattern is found in a completion and captures the reference, if any, else 0.

    A search that takes longer than a second scores 0: some patterns take exponential time.

    Args:
        pattern: Regular expression; anchor it with ``^`` and ``$``, set flags inside, as in ``(?is)``.
        answer: Name of the column with the references, each of which has to equal the first group of the last match,
            surrounding whitespace ignored; None to search only.

    Raises:
        ValueError: If the pattern is invalid or has no group to compare.

    Example:
        >>> RegexMatch(pattern=r"<a>(.*?)</a>", answer="answer")(["?"], ["<a> 4 </a>"], answer=["4"])
        [1.0]
    """

    pattern: str
    answer: str | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        if not isinstance(self.pattern, str):
            raise ValueError(f"expected pattern to be a regular expression, got {self.pattern!r:.200}")
        check_text(optional=True, answer=self.answer)
        try:
            groups = regex.compile(self.pattern).groups
        except regex.error as error:
            raise ValueError(f"expected pattern to be a regular expression, got {self.pattern!r}: {error}") from error
        if self.answer is not None and not groups:
            raise ValueError(f"expected pattern to have a group for the answer, got {self.pattern!r}")

    @property
    def columns_read(self) -> dict[str, str]:
        """Options by the columns that they name."""
        return {self.answer: "answer"} if isinstance(self.answer, str) else {}

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], *, completion_ids: Sequence[Any] = (), **columns: Any
    ) -> list[float | None]:
        """Return one value per completion; None where the reference is None."""
        texts = texts_of(completions)
        if self.answer is None:
            return [float(self._last_match(text) is not None) for text in texts]
        references = column_of(columns, self.answer, len(texts), option="answer", reward=self)
        return score_rows(texts, references, self._compare, column=self.answer, option="answer", reward=self)

    def _compare(self, text: str, reference: Any) -> float:
        if not isinstance(reference, str | Real):
            raise UnreadableReference(f"expected a string or a number, got {reference!r:.200}")
        match = self._last_match(text)
        captured = None if match is None else match[1]
        return float(captured is not None and captured.strip() == str(reference).strip())

    def _last_match(self, text: str) -> Any:
        """Return the last match; None if the pattern is not found, or not in time."""
        match = None
        with suppress(TimeoutError):
            for match in regex.finditer(self.pattern, text, timeout=TIMEOUT):  # noqa: B007  the last match counts
                if self.answer is None:
                    break
            return match
        return None
