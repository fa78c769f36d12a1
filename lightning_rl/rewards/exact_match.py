"""Reward for a completion that equals the reference."""

import re
import unicodedata
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_rl.rewards.answer_match import AnswerMatch, UnreadableReference

ARTICLES = re.compile(r"\b(?:a|an|the)\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ExactMatch(AnswerMatch):
    """Exact-match reward: 1 if a completion equals the reference, else 0; surrounding whitespace is ignored.

    With all three ``ignore_`` options, texts are normalized like those of SQuAD.

    Source: the evaluation of SQuAD, Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1.

    Args:
        answer: Name of the column with the references: a string, or a list of accepted strings.
        after: See :class:`AnswerMatch`.
        tag: See :class:`AnswerMatch`.
        ignore_case: Ignore case.
        ignore_punctuation: Ignore punctuation and symbols.
        ignore_articles: Ignore the words a, an and the, and how much whitespace is between words.

    Raises:
        ValueError: If an option is invalid.

    Example:
        >>> ExactMatch(ignore_case=True)(["?"] * 2, [" Paris", "Paris."], answer=["paris"] * 2)
        [1.0, 0.0]
    """

    ignore_case: bool = False
    ignore_punctuation: bool = False
    ignore_articles: bool = False

    @override
    def score(self, text: str, reference: Any) -> float:
        if not isinstance(reference, str):
            raise UnreadableReference(f"expected a string or a list of strings, got {reference!r:.200}")
        return float(self.normal_form(text) == self.normal_form(reference))

    def normal_form(self, text: str) -> str:
        """Return the text after normalization."""
        if self.ignore_case:
            text = text.casefold()
        if self.ignore_punctuation:
            text = "".join(letter for letter in text if unicodedata.category(letter)[0] not in "PS")
        if self.ignore_articles:
            text = " ".join(ARTICLES.sub(" ", text).split())
        return text.strip()
