"""Vocabulary: what single tokens read, so that a recording can be shown token by token without its tokenizer."""

from collections.abc import Iterable, Mapping
from typing import Any

SPACE = "\u2581"  # what SentencePiece writes in the place of a space, and drops where a text begins


class Vocabulary:
    """The texts of token ids, each decoded once.

    Args:
        tokenizer: of the run; None for a run in token ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def texts(self, ids: Iterable[int]) -> Mapping[str, str]:
        """Text by id, ids as decimal numbers; nothing without a tokenizer.

        A part of a character that takes several tokens reads U+FFFD.
        """
        if self._tokenizer is None:
            return {}
        chosen = sorted(set(ids))
        for number in chosen:
            if number not in self._texts:
                self._texts[number] = self._text(number)
        return {str(number): self._texts[number] for number in chosen}

    def _text(self, number: int) -> str:
        text = self._tokenizer.decode([number])
        piece = self._tokenizer.convert_ids_to_tokens(number)
        begins = isinstance(piece, str) and piece.startswith(SPACE) and not text.startswith(" ")
        return f" {text}" if begins else text
