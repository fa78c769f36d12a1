"""Texts of single tokens, so that a recording can be displayed without its tokenizer."""

from collections.abc import Iterable, Mapping
from typing import Any

SPACE = "\u2581"  # SentencePiece's space, dropped at the start of a text


class Vocabulary:
    """Texts of token ids, each decoded once.

    Args:
        tokenizer: Tokenizer of the run; None for a run on token ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def texts(self, ids: Iterable[int]) -> Mapping[str, str]:
        """Return texts by id, ids as decimal strings; empty without a tokenizer.

        A token with part of a multi-token character has the text U+FFFD.
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
