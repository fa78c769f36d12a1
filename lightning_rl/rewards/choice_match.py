"""Reward for the correct choice in multiple-choice questions."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from typing_extensions import override

from lightning_rl.rewards.answer_match import AnswerMatch, UnreadableReference, references_in
from lightning_rl.rewards.text import MARKERS, column_of, stated_answer
from lightning_rl.utils.arguments import check_text, check_texts

DECORATION = " \t\r\n*_`\"'()[]{}<>.:,;!?$\\\uff1a\uff08\uff09\u3002"
NOT_NEGATED = r"(?<!\bnot\s)(?<!n['\u2019]t\s)"


@dataclass(frozen=True, kw_only=True)
class ChoiceMatch(AnswerMatch):
    r"""Multiple-choice reward: 1 if a completion chooses the reference, else 0.

    The last marker decides: the choice is the letter after it, upper or lower case (``Answer: B``, ``the answer is
    (b)``, ``\boxed{B}``), unless another follows (``A or B``), else the last letter in brackets or bold after it. A box
    that is not closed states no choice. Without a marker the choice is the whole completion (``b``, ``B.``, ``(B) a
    whale``), else the last letter in brackets, before a bracket or in bold. With ``choices``, the text of a choice
    counts like its letter.

    Args:
        answer: Name of the column with the references: letters, indices from 0, texts of choices, or lists of them.
        after: See :class:`AnswerMatch`.
        tag: See :class:`AnswerMatch`.
        letters: Letters of the choices, in order.
        choices: Name of the column with the list of choice texts of each row; None for letters only.
        markers: Strings that precede an answer, case-insensitive.

    Raises:
        ValueError: If there are fewer than two letters, or a letter occurs twice.

    Example:
        >>> ChoiceMatch()(["?"] * 3, ["B", "A or B? Answer: (A)", "none"], answer=["B", "B", "B"])
        [1.0, 0.0, 0.0]
    """

    letters: str = "ABCD"
    choices: str | None = None
    markers: tuple[str, ...] = MARKERS

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_text(optional=True, choices=self.choices)
        check_texts(markers=self.markers)
        if (
            not isinstance(self.letters, str)
            or len(set(self.letters.upper())) != len(self.letters)
            or len(self.letters) < 2
        ):
            raise ValueError(
                f"expected letters to be two or more different letters, such as 'ABCD', got {self.letters!r}"
            )

    @override
    def references_of(self, columns: dict[str, Any], rows: int) -> Sequence[Any]:
        references = super().references_of(columns, rows)
        if self.choices is None:
            return references
        choices = column_of(columns, self.choices, rows, option="choices", reward=self)
        pairs = zip(references, choices, strict=True)
        return [None if known is None else [(one, row) for one in references_in(known)] for known, row in pairs]

    @override
    def score(self, text: str, reference: Any) -> float:
        reference, choices = reference if self.choices is not None else (reference, ())
        if choices is not None and not isinstance(choices, list | tuple):
            raise UnreadableReference(f"expected a list of choice texts, got {choices!r:.200}")
        known = [_normal_form(choice) for choice in choices or ()]
        return float(self.index_of_text(text, known) == self.index_of_reference(reference, known))

    def index_of_reference(self, reference: Any, choices: Sequence[str] = ()) -> int:
        """Return the index of the correct choice.

        Raises:
            UnreadableReference: If the reference names no choice.
        """
        if isinstance(reference, int) and not isinstance(reference, bool) and 0 <= reference < len(self.letters):
            return reference
        if isinstance(reference, str):
            if _normal_form(reference) in choices:
                return choices.index(_normal_form(reference))
            letter = reference.strip(DECORATION)
            lettered = self._letter_before_text(reference)
            if lettered is not None or (len(letter) == 1 and letter.upper() in self.letters.upper()):
                return self._index_of_letter(lettered or letter)
        hint = "" if choices else ", or (with choices=) the text of a choice"
        raise UnreadableReference(
            f"expected one of the letters {self.letters!r}, an index below {len(self.letters)}{hint}, "
            f"got {reference!r:.200}"
        )

    def index_of_text(self, text: str, choices: Sequence[str] = ()) -> int | None:
        """Return the index of the choice that a completion makes, or None."""
        stated = stated_answer(text, self.markers)
        if stated is None:
            return self._index_without_marker(text, choices)
        if _start_pattern(self.letters, several=True).match(stated):
            return None
        index = self._index_at_start(stated, choices)
        return self._last_letter_in_brackets(stated, re.IGNORECASE) if index is None else index

    def _index_without_marker(self, text: str, choices: Sequence[str]) -> int | None:
        bare = text.strip(DECORATION)
        if len(bare) == 1 and bare.upper() in self.letters.upper():
            return self._index_of_letter(bare)
        if _normal_form(text) in choices:
            return choices.index(_normal_form(text))
        lettered = self._letter_before_text(text)
        return self._index_of_letter(lettered) if lettered else self._last_letter_in_brackets(text)

    def _letter_before_text(self, text: str) -> str | None:
        """Return the letter before the text of a choice, as in ``B) a whale``."""
        match = re.match(rf"[\s*_(\[]*([{re.escape(self.letters)}])[*_]*[).:\]]", text)
        return match[1] if match else None

    def _index_at_start(self, stated: str, choices: Sequence[str]) -> int | None:
        normal = _normal_form(stated)
        longest = max((choice for choice in choices if _starts(normal, choice)), key=len, default="")
        if longest:
            return choices.index(longest)
        match = _start_pattern(self.letters).match(stated)
        return self._index_of_letter(match[1]) if match else None

    def _last_letter_in_brackets(self, text: str, flags: int = 0) -> int | None:
        """Return the index of the last letter in brackets or bold that is not negated."""
        letter = rf"([{re.escape(self.letters)}])"
        emphasized = re.findall(rf"{NOT_NEGATED}(?:(?:\(|\[|\*\*)|(?<=\s)(?=.\))){letter}(?:\)|\]|\*\*)", text, flags)
        return self._index_of_letter(emphasized[-1]) if emphasized else None

    def _index_of_letter(self, letter: str) -> int:
        return self.letters.upper().index(letter.upper())


@lru_cache(maxsize=64)
def _start_pattern(letters: str, *, several: bool = False) -> re.Pattern[str]:
    """Return a pattern for a letter at the start of an answer, after decoration such as ``option`` or brackets.

    The words ``a`` and ``I`` before another word are no letters. With ``several``, a second letter has to follow.
    """
    named = r"\b(?i:option|choice)\b"
    decoration = rf"(?:[\s*_`\"'()\[\]{{}}$:\uff1a\uff08]|\\(?:text|math)\w*+|\\mbox|{named})*"
    letter = rf"([{_both_cases(letters)}])(?![a-zA-Z0-9]|['\u2019])"
    second = rf"[)\]*}}]*\s*(?:/|&|\b(?i:or|and)\b){decoration}{letter}" if several else ""
    return re.compile(rf"{decoration}(?:(?<={named}\s)|(?![aiI]\s+\w)){letter}{second}")


def _both_cases(letters: str) -> str:
    return re.escape(letters.upper() + letters.lower())


def _starts(stated: str, choice: str) -> bool:
    return bool(choice) and stated.startswith(choice) and not stated[len(choice) : len(choice) + 1].isalnum()


def _normal_form(text: Any) -> str:
    folded = unicodedata.normalize("NFKC", str(text)).casefold()
    return re.sub(r"\s+", " ", folded).strip(DECORATION)
