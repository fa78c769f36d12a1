"""Extraction of answers from completions by ``Evaluation(answer=)``."""

import traceback
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from lightning_rl.utils.keys import hide_secrets


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractedAnswers:
    """Answers of some completions, None for no vote; ``read`` is False where extraction failed, first by ``cause``."""

    values: tuple[Hashable | None, ...]
    read: tuple[bool, ...]
    cause: str = ""


def read_answers(extract: Callable[[str], Hashable] | None, texts: Sequence[str]) -> ExtractedAnswers:
    """Extract the answer of each completion; an error or an unhashable answer affects its own sample only."""
    if extract is None:
        return ExtractedAnswers(values=(None,) * len(texts), read=(True,) * len(texts))
    values: list[Hashable | None] = []
    causes: list[str] = []
    for text in texts:
        value, cause = _read(extract, text)
        values.append(value)
        causes.append(cause)
    first = next((cause for cause in causes if cause), "")
    return ExtractedAnswers(values=tuple(values), read=tuple(not cause for cause in causes), cause=first)


def _read(extract: Callable[[str], Hashable], text: str) -> tuple[Hashable | None, str]:
    """Return an answer, and the failure of the function or an empty string."""
    try:
        value = extract(text)
    except Exception as error:  # noqa: BLE001  a failure of user code drops a sample and does not end the run
        lines = traceback.format_exc().rstrip()
        cause = f"raised {type(error).__name__}: {hide_secrets(str(error))} for completion {text!r:.1000}"
        return None, f"{cause}\n{hide_secrets(lines)}"
    try:
        hash(value)
    except TypeError:
        kind = type(value).__name__
        return None, (
            f"returned {value!r:.200}, a {kind}, which cannot be counted as a vote, for completion {text!r:.1000}: "
            "return a text, a number or a tuple"
        )
    return value, ""


def report_answers(name: str, number: int, cause: str) -> None:
    """Warn once of the number of failed extractions in an evaluation on this rank, with the first cause, if any."""
    if cause:
        warnings.warn(
            f'answer of evaluation "{name}" failed on {number} samples, which do not vote: it {cause}', stacklevel=2
        )
