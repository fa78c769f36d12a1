"""Language: whether a completion is written in the wanted language, found by py3langid, whose model it brings along."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from lightning_rl.arguments import check_choices, check_counts, check_text, check_texts
from lightning_rl.rewards.answer_match import UnreadableReference, score_rows
from lightning_rl.rewards.extras import require
from lightning_rl.rewards.text import column_of, texts_of

NO_PROSE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$[^$]*\$\$|\$[^$\n]*\$"
    r"|\\\((?:(?!\\[()]).)*+\\\)|\\\[(?:(?!\\[\[\]]).)*+\\\]|</?\w+>|\\\w+",
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Language:
    """How much of a completion is in the wanted language: the share of the letters whose line is.

    Code, formulas and tags are left out first. A completion with fewer letters than ``min_letters`` has no language to
    speak of and gets None: the reward does not apply.

    Source: the language consistency reward of DeepSeek-AI 2025 (DeepSeek-R1), arXiv:2501.12948, section 2.3.2, which
    counts words; the identifier: Lui and Baldwin 2012, langid.py.

    Args:
        language: the code of the wanted language in ISO 639-1, such as ``"en"``.
        column: the column that holds the code for each row, in place of ``language``.
        among: the languages that a completion may be in: the fewer, the surer; all that py3langid knows if empty.
        by: ``"line"`` for the share of letters, ``"text"`` for 1 or 0 by the completion as a whole.
        min_letters: below which a completion has no language, and a line goes with the whole text.

    Raises:
        ImportError: if py3langid is missing; the message says how to install it.
        ValueError: if an option is out of range, or a language unknown.
    """

    language: str | None = None
    column: str | None = None
    among: tuple[str, ...] = ()
    by: Literal["line", "text"] = "line"
    min_letters: int = 12

    def __post_init__(self) -> None:
        """Checks the options."""
        require("py3langid", extra="language")
        if (self.language is None) == (self.column is None):
            raise ValueError(f"expected either language or column, got {self.language!r} and {self.column!r}")
        check_text(optional=True, language=self.language, column=self.column)
        check_choices(("line", "text"), by=self.by)
        check_counts(1, min_letters=self.min_letters)
        check_texts(among=self.among)
        known = _identifier(()).labels
        unknown = sorted({*self.among, *([self.language] if self.language else [])} - set(known))
        if unknown:
            raise ValueError(f"expected codes of languages in {sorted(known)}, got {unknown}")
        if self.among and self.language not in (None, *self.among):
            raise ValueError(f"expected language to be one of among={self.among}, got {self.language!r}")

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], *, completion_ids: Sequence[Any] = (), **columns: Any
    ) -> list[float | None]:
        """A value for each completion, by the contract of rewards; None also where the column holds None."""
        texts = texts_of(completions)
        if self.column is None:
            return [self._value(text, str(self.language)) for text in texts]
        wanted = column_of(columns, self.column, len(texts), option="column", reward=self)
        return score_rows(texts, wanted, self._score_row, column=self.column, option="column", reward=self)

    def _score_row(self, text: str, language: Any) -> float | None:
        known = self.among or _identifier(()).labels
        if language not in known:
            raise UnreadableReference(f"expected the code of a language in {sorted(known)}, got {language!r:.200}")
        return self._value(text, language)

    def _value(self, text: str, wanted: str) -> float | None:
        prose = NO_PROSE.sub(" ", text)
        letters = _letters(prose)
        if letters < self.min_letters:
            return None
        whole = float(self._language_of(prose) == wanted)
        if self.by == "text":
            return whole
        right = 0.0
        for line in prose.splitlines():
            count = _letters(line)
            right += count * (float(self._language_of(line) == wanted) if count >= self.min_letters else whole)
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
