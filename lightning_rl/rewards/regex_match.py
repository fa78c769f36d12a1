"""RegexMatch: whether a pattern occurs in a completion, or captures the reference there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import regex

from lightning_rl.rewards.text import column_of, text_of


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
        try:
            groups = regex.compile(self.pattern)
        except regex.error as error:
            raise ValueError(f"expected pattern to be a regular expression, got {self.pattern!r}: {error}") from error
        names = [*range(groups.groups + 1), *groups.groupindex]
        if self.answer is not None and self.group not in names:
            raise ValueError(
                f"expected group to be one of {names}, as pattern {self.pattern!r} has, got {self.group!r}"
            )
        if not self.timeout > 0:
            raise ValueError(f"expected timeout > 0 seconds, got {self.timeout}")

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], *, completion_ids: Sequence[Any] = (), **columns: Any
    ) -> list[float | None]:
        """A value for each completion, by the contract of rewards; None where the reference is None."""
        texts = [text_of(completion) for completion in completions]
        if self.answer is None:
            return [float(self._capture(text, 0) is not None) for text in texts]
        references = column_of(columns, self.answer, option="answer", reward=self)
        return [
            None if reference is None else float(self._capture(text, self.group) == str(reference).strip())
            for text, reference in zip(texts, references, strict=True)
        ]

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
