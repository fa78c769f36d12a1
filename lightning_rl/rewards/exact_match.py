"""ExactMatch: whether a completion is the reference, letter by letter or up to what does not matter."""

import re
import unicodedata
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_rl.arguments import check_bools, check_text
from lightning_rl.rewards.answer_match import AnswerMatch, UnreadableReference


@dataclass(frozen=True, kw_only=True)
class ExactMatch(AnswerMatch):
    """1 if a completion is the reference, else 0; whitespace at both ends never matters.

    Args:
        answer: the column that holds the references, each a text, or a list of texts of which any will do.
        after: a text, such as ``"</think>"``: only what follows its last occurrence is compared, and a completion
            without it scores 0; None for the whole completion.
        ignore_case: whether upper and lower case are the same.
        ignore_spaces: whether any whitespace is one space.
        ignore_punctuation: whether punctuation and symbols are left out.

    Raises:
        ValueError: if an option is none of what it may be.

    Example:
        >>> ExactMatch(ignore_case=True)(["?"] * 2, [" Paris", "Paris."], answer=["paris"] * 2)
        [1.0, 0.0]
    """

    after: str | None = None
    ignore_case: bool = False
    ignore_spaces: bool = False
    ignore_punctuation: bool = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        check_text(optional=True, after=self.after)
        flags = {"ignore_case": self.ignore_case, "ignore_spaces": self.ignore_spaces}
        check_bools(**flags, ignore_punctuation=self.ignore_punctuation)

    @override
    def score(self, text: str, reference: Any) -> float:
        accepted = [reference] if isinstance(reference, str) else reference
        if not isinstance(accepted, list | tuple) or not all(isinstance(known, str) for known in accepted):
            raise UnreadableReference(f"expected a text or a list of texts, got {reference!r:.200}")
        if self.after is not None:
            _, present, text = text.rpartition(self.after)
            if not present:
                return 0.0
        return float(self.normal_form(text) in [self.normal_form(known) for known in accepted])

    def normal_form(self, text: str) -> str:
        """What is left of a text when all that does not matter is gone."""
        if self.ignore_case:
            text = text.casefold()
        if self.ignore_punctuation:
            text = "".join(letter for letter in text if unicodedata.category(letter)[0] not in "PS")
        if self.ignore_spaces:
            text = re.sub(r"\s+", " ", text)
        return text.strip()
