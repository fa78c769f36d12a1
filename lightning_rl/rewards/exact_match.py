"""Reward for a completion that equals the reference."""

import unicodedata
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_rl.rewards.answer_match import AnswerMatch, UnreadableReference
from lightning_rl.utils.arguments import check_text


@dataclass(frozen=True, kw_only=True)
class ExactMatch(AnswerMatch):
    """Exact-match reward: 1 if a completion equals the reference, else 0; surrounding whitespace is ignored.

    Args:
        answer: Name of the column with the references: a string, or a list of accepted strings.
        after: Marker such as ``"</think>"``: compare only the text after its last occurrence, and score a completion
            without it 0. None compares the whole completion.
        ignore_case: Ignore case.
        ignore_punctuation: Ignore punctuation and symbols.

    Raises:
        ValueError: If an option is invalid.

    Example:
        >>> ExactMatch(ignore_case=True)(["?"] * 2, [" Paris", "Paris."], answer=["paris"] * 2)
        [1.0, 0.0]
    """

    after: str | None = None
    ignore_case: bool = False
    ignore_punctuation: bool = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        check_text(optional=True, after=self.after)

    @override
    def score(self, text: str, reference: Any) -> float:
        accepted = [reference] if isinstance(reference, str) else reference
        if not isinstance(accepted, list | tuple) or not all(isinstance(known, str) for known in accepted):
            raise UnreadableReference(f"expected a string or a list of strings, got {reference!r:.200}")
        if self.after is not None:
            _, present, text = text.rpartition(self.after)
            if not present:
                return 0.0
        return float(self.normal_form(text) in [self.normal_form(known) for known in accepted])

    def normal_form(self, text: str) -> str:
        """Return the text after normalization."""
        if self.ignore_case:
            text = text.casefold()
        if self.ignore_punctuation:
            text = "".join(letter for letter in text if unicodedata.category(letter)[0] not in "PS")
        return text.strip()
