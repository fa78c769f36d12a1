"""Reward for the language of a completion, identified by py3langid."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_rl.rewards.answer_match import UnreadableReference, score_rows
from lightning_rl.rewards.optional_imports import require
from lightning_rl.rewards.text import column_of, texts_of
from lightning_rl.utils.arguments import check_text, check_texts

MIN_LETTERS = 12
NO_PROSE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$[^$]*\$\$|\$[^$\n]*\$"
    r"|\\\((?:(?!\\[()]).)*\\\)|\\\[(?:(?!\\[\[\]]).)*\\\]|</?\w+>|\\\w+",
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Language:
    """Share of a completion's letters that are in lines of the requested language.

    Code, formulas and tags are removed first. A line of fewer than 12 letters takes the language of the whole text. A
    completion of fewer than 12 letters gets None: the reward does not apply.

    Source: the language consistency reward of DeepSeek-AI 2025 (DeepSeek-R1), arXiv:2501.12948, section 2.3.2, which
    counts words; the identifier: Lui and Baldwin 2012, langid.py.

    Args:
        language: ISO 639-1 code of the requested language, such as ``"en"``.
        column: Name of the column with the code of each row, instead of ``language``.
        among: Candidate languages; fewer make the identification more reliable. Empty for all that py3langid supports.

    Raises:
        ImportError: If py3langid is not installed.
        ValueError: If an option is out of range, or a language is unknown.
    """

    language: str | None = None
    column: str | None = None
    among: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the options."""
        require("py3langid", extra="language")
        if (self.language is None) == (self.column is None):
            raise ValueError(f"expected either language or column, got {self.language!r} and {self.column!r}")
        check_text(optional=True, language=self.language, column=self.column)
        check_texts(among=self.among)
        known = _identifier(()).labels
        unknown = sorted({*self.among, *([self.language] if self.language else [])} - set(known))
        if unknown:
            raise ValueError(f"expected language codes in {sorted(known)}, got {unknown}")
        if self.among and self.language not in (None, *self.among):
            raise ValueError(f"expected language to be one of among={self.among}, got {self.language!r}")

    @property
    def columns_read(self) -> dict[str, str]:
        """Options by the columns that they name."""
        return {self.column: "column"} if isinstance(self.column, str) else {}

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], *, completion_ids: Sequence[Any] = (), **columns: Any
    ) -> list[float | None]:
        """Return one value per completion; None also where the column holds None."""
        texts = texts_of(completions)
        if self.column is None:
            return [self._value(text, str(self.language)) for text in texts]
        wanted = column_of(columns, self.column, len(texts), option="column", reward=self)
        return score_rows(texts, wanted, self._score_row, column=self.column, option="column", reward=self)

    def _score_row(self, text: str, language: Any) -> float | None:
        known = self.among or _identifier(()).labels
        if language not in known:
            raise UnreadableReference(f"expected a language code in {sorted(known)}, got {language!r:.200}")
        return self._value(text, language)

    def _value(self, text: str, wanted: str) -> float | None:
        prose = NO_PROSE.sub(" ", text)
        letters = _letters(prose)
        if letters < MIN_LETTERS:
            return None
        whole = float(self._language_of(prose) == wanted)
        right = 0.0
        for line in prose.splitlines():
            count = _letters(line)
            right += count * (float(self._language_of(line) == wanted) if count >= MIN_LETTERS else whole)
        return right / letters

    def _language_of(self, text: str) -> str:
        return _identifier(tuple(self.among)).classify(text)[0]


def _letters(text: str) -> int:
    return sum(letter.isalpha() for letter in text)


@lru_cache(maxsize=16)
def _identifier(languages: tuple[str, ...]) -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    if languages:
        identifier.set_languages(languages)
    return identifier
