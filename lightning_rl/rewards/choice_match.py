"""Reward for the correct choice in multiple-choice questions."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_rl.rewards.answer_match import AnswerMatch, UnreadableReference, references_in
from lightning_rl.rewards.choice_reading import AND, TURN, letter_reader
from lightning_rl.rewards.text import MARKERS, answer_place, column_of, join_boxes
from lightning_rl.utils.arguments import check_text, check_texts

DECORATION = " \t\r\n*_`\"'()[]{}<>.:,;!?$\\\uff1a\uff08\uff09\u3002"
TEXT = re.compile(r"\\(?:text|math|mbox)\w*\s*\{([^{}]*)\}")
GOES_ON = re.compile(r"[^\W_]|\s*\\?[%^*/+=]|[.,:-][0-9]")
JOIN = re.compile(rf"[\s)\]}}*.$\"']*(?:[,;]\s*)?(?:{AND}|[,;])[\s(\[{{*$\"']*", re.IGNORECASE)
DELIMITER = re.compile(r"\\[()\[\]]")  # of a formula


@dataclass(frozen=True, kw_only=True)
class ChoiceMatch(AnswerMatch):
    r"""Multiple-choice reward: 1 if a completion chooses the reference, else 0.

    The last marker or sentence decides: the letter after it or in it, upper or lower case (``Answer: B``,
    ``\boxed{B}``, ``the correct option is (b)``, ``B is the answer``, ``I choose B``), else the last letter in brackets
    or bold after it. Several letters (``A or B``, ``A, B``) are no choice, nor is a letter in a box that is not closed.
    Letters that are ruled out (``not A``, ``A is wrong``) and the article of ``A dog`` do not count. Without a marker
    or a sentence the choice is the whole completion or its first or last line (``b``, ``B.``, ``(B) a whale``), else
    the last letter in brackets or in bold. With ``choices``, the text of a choice counts like its letter.

    Args:
        answer: Name of the column with the references: letters, several right ones such as ``ACD``, indices from 0,
            texts of choices, or lists of references, of which one has to match.
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

    @property
    @override
    def columns_read(self) -> dict[str, str]:
        return super().columns_read | ({} if self.choices is None else {self.choices: "choices"})

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
        wanted = self.letters_of_reference(reference, known)
        if len(wanted) > 1:  # an answer may lack separators, too
            text = letter_reader(self.letters).with_commas(text)
        return float(self.letters_of_text(text, known) == wanted)

    def letters_of_reference(self, reference: Any, choices: Sequence[str] = ()) -> set[int]:
        """Return the indices of the letters that the reference names.

        Raises:
            UnreadableReference: If the reference names no choice.
        """
        if isinstance(reference, int) and not isinstance(reference, bool) and 0 <= reference < len(self.letters):
            return {reference}
        if isinstance(reference, str):
            if _normal_form(reference) in choices:
                return {choices.index(_normal_form(reference))}
            reader = letter_reader(self.letters)
            named = reader.several(reference) or reader.label(reference) or reference.strip(DECORATION)
            if reader.several(reference) or (len(named) == 1 and named.upper() in self.letters.upper()):
                return self._indices_of(named)
        hint = "" if choices else ", or (with choices=) the text of a choice"
        raise UnreadableReference(
            f"expected one of the letters {self.letters!r}, an index below {len(self.letters)}{hint}, "
            f"got {reference!r:.200}"
        )

    def letters_of_text(self, text: str, choices: Sequence[str] = ()) -> set[int]:
        """Return the indices of the letters that a completion names as its choice."""
        text = DELIMITER.sub("$", unicodedata.normalize("NFKC", text)).replace(
            "\u3010\u7b54\u6848\u3011", "\u7b54\u6848:"
        )
        reader, text = letter_reader(self.letters), join_boxes(text)
        start, begin, end = answer_place(text, self.markers) or (-1, 0, len(text))
        marked, normal = start >= 0, _normal_form(text[begin:end])
        if said := _choices_at_start(normal, choices) if marked else {one for one in choices if normal == one}:
            return set(map(choices.index, said))
        heard = reader.without_ruled_out(text)
        if not marked and (whole := reader.whole(heard)):
            return self._indices_of(whole)
        found = reader.statements(heard[:end], self.markers)
        if found and found[-1].end > start:
            before = [one.letters for one in found[-2:-1] if not TURN.search(heard[one.end : found[-1].begin])]
            return self._indices_of("".join([*before, found[-1].letters]))
        if not marked and (alone := reader.last_sentence(heard) or reader.first_label(heard)):
            return self._indices_of(alone)
        return self._indices_of(reader.letter_in_brackets(heard[begin:end], any_case=marked))

    def _indices_of(self, letters: str) -> set[int]:
        return {self.letters.upper().index(letter.upper()) for letter in letters}


def _choices_at_start(stated: str, choices: Sequence[str]) -> set[str]:
    """Return the choice with which a text begins, and those that "or", a comma etc. join to it."""
    found, place = set[str](), 0
    while here := [one for one in choices if one and stated.startswith(one, place)]:
        choice = max(here, key=len)
        if GOES_ON.match(stated, place + len(choice)):
            break
        found.add(choice)
        if (joined := JOIN.match(stated, place + len(choice))) is None:
            break
        place = joined.end()
    return found


def _normal_form(text: Any) -> str:
    folded = unicodedata.normalize("NFKC", TEXT.sub(r"\1", str(text))).casefold()
    return re.sub(r"\s+", " ", folded).strip(DECORATION)
