"""RegexMatch: whether a pattern occurs in a completion, or captures the reference there."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import regex

from lightning_rl.arguments import check_bools, check_numbers, check_text
from lightning_rl.rewards.answer_match import UnreadableReference, score_rows
from lightning_rl.rewards.text import column_of, texts_of


@dataclass(frozen=True, kw_only=True)
class RegexMatch:
    """1 if a pattern is found in a completion, and captures the reference if there is one, else 0.

    A search that takes longer than ``timeout`` scores 0: some patterns take exponential time on some texts.

    Args:
        pattern: a regular expression; anchor it by ``^`` and ``$``, set flags inside, as in ``(?is)``.
        answer: the column that holds the references; None if finding the pattern is all.
        group: what has to be the reference, whitespace at both ends aside: a number or name of a group of the pattern.
        last: whether the last place counts, rather than the first, if the pattern is found in several.
        timeout: seconds for one completion.

    Raises:
        ValueError: if the pattern is none, has no such group, or the timeout is not positive.

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
        """Checks the options."""
        if not isinstance(self.pattern, str):
            raise ValueError(f"expected pattern to be a regular expression, got {self.pattern!r:.200}")
        check_text(optional=True, answer=self.answer)
        check_bools(last=self.last)
        check_numbers(above=0, finite=True, timeout=self.timeout)
        try:
            groups = regex.compile(self.pattern)
        except regex.error as error:
            raise ValueError(f"expected pattern to be a regular expression, got {self.pattern!r}: {error}") from error
        names = [*range(groups.groups + 1), *groups.groupindex]
        if self.answer is not None and self.group not in names:
            raise ValueError(
                f"expected group to be one of {names}, as pattern {self.pattern!r} has, got {self.group!r}"
            )

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], *, completion_ids: Sequence[Any] = (), **columns: Any
    ) -> list[float | None]:
        """A value for each completion, by the contract of rewards; None where the reference is None."""
        texts = texts_of(completions)
        if self.answer is None:
            return [float(self._capture(text, 0) is not None) for text in texts]
        references = column_of(columns, self.answer, len(texts), option="answer", reward=self)
        return score_rows(texts, references, self._compare, column=self.answer, option="answer", reward=self)

    def _compare(self, text: str, reference: Any) -> float:
        if not isinstance(reference, str | Real):
            raise UnreadableReference(f"expected a text or a number, got {reference!r:.200}")
        return float(self._capture(text, self.group) == str(reference).strip())

    def _capture(self, text: str, group: int | str) -> str | None:
        """What the group captures; None if the pattern is not found, or not in time."""
        captured: str | None = None
        try:
            for match in regex.finditer(self.pattern, text, timeout=self.timeout):
                captured = match[group]
                if not self.last or group == 0:
                    break
        except TimeoutError:
            return None
        return None if captured is None else captured.strip()
