"""Reward for the words that a completion shares with the reference."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_rl.rewards.answer_match import AnswerMatch, UnreadableReference
from lightning_rl.rewards.exact_match import ExactMatch

SQUAD = ExactMatch(ignore_case=True, ignore_punctuation=True, ignore_articles=True)


@dataclass(frozen=True, kw_only=True)
class TokenF1(AnswerMatch):
    """F1 reward: harmonic mean of precision and recall of a completion's words against those of the reference.

    Case, punctuation and articles are ignored. Two texts without words are equal.

    Source: the evaluation of SQuAD, Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1.

    Args:
        answer: Name of the column with the references: a string, or a list of accepted strings.
        after: See :class:`AnswerMatch`.
        tag: See :class:`AnswerMatch`.

    Example:
        >>> TokenF1()(["?"], ["The Eiffel Tower in Paris"], answer=["Eiffel tower"])
        [0.6666666666666666]
    """

    @override
    def score(self, text: str, reference: Any) -> float:
        if not isinstance(reference, str):
            raise UnreadableReference(f"expected a string or a list of strings, got {reference!r:.200}")
        given, wanted = (SQUAD.normal_form(part).split() for part in (text, reference))
        if not given or not wanted:
            return float(given == wanted)
        return 2 * (Counter(given) & Counter(wanted)).total() / (len(given) + len(wanted))
