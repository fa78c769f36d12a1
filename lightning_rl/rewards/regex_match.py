"""Reward for a regular expression that a completion matches."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import regex

from lightning_rl.rewards.answer_match import UnreadableReference, score_rows
from lightning_rl.rewards.text import column_of, texts_of
from lightning_rl.utils.arguments import check_numbers, check_text


@dataclass(frozen=True, kw_only=True)
class RegexMatch:
    """Regex reward: 1 if a pattern is found in a completion and captures the reference, if any, else 0.

    A search that takes longer than ``timeout`` scores 0: some patterns take exponential time.

    Args:
        pattern: Regular expression; anchor it with ``^`` and ``$``, set flags inside, as in ``(?is)``.
        answer: Name of the column with the references; None to search only.
        group: Number or name of the group that must equal the reference, surrounding whitespace ignored.
        last: Use the last match rather than the first.
        timeout: Time limit of one completion in seconds.

    Raises:
        ValueError: If the pattern is invalid or has no such group, or the timeout is not positive.

    Example:
        >>> RegexMatch(pattern=r"<a>(.*?)</a>", answer="answer")(["?"], ["<a> 4 </a>"], answer=["4"])
        [1.0]
    """

    pattern: str
    answer: str | None = None
    group: int | str = 1
    last: bool = True
    timeout: float = 1.0

    def __post_init__(self) -> None:
        """Check the options."""
        if not isinstance(self.pattern, str):
            raise ValueError(f"expected pattern to be a regular expression, got {self.pattern!r:.200}")
        check_text(optional=True, answer=self.answer)
        check_numbers(above=0, finite=True, timeout=self.timeout)
        try:
            groups = regex.compile(self.pattern)
        except regex.error as error:
            raise ValueError(f"expected pattern to be a regular expression, got {self.pattern!r}: {error}") from error
        names = [*range(groups.groups + 1), *groups.groupindex]
        if self.answer is not None and self.group not in names:
            raise ValueError(
                f"expected group to be one of the groups {names} of pattern {self.pattern!r}, got {self.group!r}"
            )

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], *, completion_ids: Sequence[Any] = (), **columns: Any
    ) -> list[float | None]:
        """Return one value per completion; None where the reference is None."""
        texts = texts_of(completions)
        if self.answer is None:
            return [float(self._capture(text, 0) is not None) for text in texts]
        references = column_of(columns, self.answer, len(texts), option="answer", reward=self)
        return score_rows(texts, references, self._compare, column=self.answer, option="answer", reward=self)

    def _compare(self, text: str, reference: Any) -> float:
        if not isinstance(reference, str | Real):
            raise UnreadableReference(f"expected a string or a number, got {reference!r:.200}")
        return float(self._capture(text, self.group) == str(reference).strip())

    def _capture(self, text: str, group: int | str) -> str | None:
        """Return the text of the group; None if the pattern is not found, or not in time."""
        captured: str | None = None
        try:
            for match in regex.finditer(self.pattern, text, timeout=self.timeout):
                captured = match[group]
                if not self.last or group == 0:
                    break
        except TimeoutError:
            return None
        return None if captured is None else captured.strip()
