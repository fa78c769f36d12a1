"""Reward for the correct choice in multiple-choice questions."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from typing_extensions import override

from lightning_rl.rewards.answer_match import AnswerMatch, UnreadableReference
from lightning_rl.rewards.text import MARKERS, answer_spans, column_of, texts_of
from lightning_rl.utils.arguments import check_text, check_texts

DECORATION = " \t\r\n*_`\"'()[]{}<>.:,;!?$\\"


@dataclass(frozen=True, kw_only=True)
class ChoiceMatch(AnswerMatch):
    r"""Multiple-choice reward: 1 if a completion chooses the reference, else 0.

    The choice is the letter after the last marker (``Answer: B``, ``the answer is (B)``, ``\boxed{B}``). Without a
    marker it is the whole completion (``b``, ``B.``, ``(B) a whale``), else the last letter in brackets or bold. With
    ``choices``, the text of a choice counts like its letter.

    Args:
        answer: Name of the column with the references: letters, indices from 0, or texts of choices.
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
    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], *, completion_ids: Sequence[Any] = (), **columns: Any
    ) -> list[float | None]:
        texts = texts_of(completions)
        references = column_of(columns, self.answer, len(texts), option="answer", reward=self)
        if self.choices is None:
            return self.compare(texts, references)
        choices = column_of(columns, self.choices, len(texts), option="choices", reward=self)
        pairs = [None if wanted is None else (wanted, row) for wanted, row in zip(references, choices, strict=True)]
        return self.compare(texts, pairs)

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
            letter = reference.strip(DECORATION).upper()
            if len(letter) == 1 and letter in self.letters.upper():
                return self.letters.upper().index(letter)
        hint = "" if choices else ", or (with choices=) the text of a choice"
        raise UnreadableReference(
            f"expected one of the letters {self.letters!r}, an index below {len(self.letters)}{hint}, "
            f"got {reference!r:.200}"
        )

    def index_of_text(self, text: str, choices: Sequence[str] = ()) -> int | None:
        """Return the index of the choice that a completion makes, or None."""
        for span in answer_spans(text, self.markers):
            index = self._index_at_start(span, choices)
            if index is not None:
                return index
        bare = text.strip(DECORATION)
        if len(bare) == 1 and bare.upper() in self.letters.upper():
            return self.letters.upper().index(bare.upper())
        if _normal_form(text) in choices:
            return choices.index(_normal_form(text))
        lettered = re.match(rf"[\s*_(\[]*([{re.escape(self.letters)}])[*_]*[).:\]]", text)
        if lettered:
            return self.letters.index(lettered[1])
        emphasized = re.findall(rf"(?:\(|\[|\*\*)([{re.escape(self.letters)}])(?:\)|\]|\*\*)", text)
        return self.letters.index(emphasized[-1]) if emphasized else None

    def _index_at_start(self, span: str, choices: Sequence[str]) -> int | None:
        stated = _normal_form(span)
        longest = max((choice for choice in choices if _starts(stated, choice)), key=len, default="")
        if longest:
            return choices.index(longest)
        match = _start_pattern(self.letters).match(span)
        return self.letters.index(match[1]) if match else None


@lru_cache(maxsize=64)
def _start_pattern(letters: str) -> re.Pattern[str]:
    """Return a pattern for a letter at the start of an answer, after decoration such as ``option`` or brackets."""
    decoration = r"(?:[\s*_`\"'()\[\]{}$:]|\\text\w*+|\b(?i:option|choice)\b)*"
    return re.compile(rf"{decoration}([{re.escape(letters)}])(?![^\W_]|['\u2019])")


def _starts(stated: str, choice: str) -> bool:
    return bool(choice) and stated.startswith(choice) and not stated[len(choice) : len(choice) + 1].isalnum()


def _normal_form(text: Any) -> str:
    folded = unicodedata.normalize("NFKC", str(text)).casefold()
    return re.sub(r"\s+", " ", folded).strip(DECORATION)
