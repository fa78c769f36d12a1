"""Answers: what ``Evaluation(answer=)`` finds in completions, and what it fails on."""

import traceback
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The answers of some completions.

    Args:
        values: None for no vote: there is no answer, or it could not be found.
        read: whether each could be looked for.
        cause: the first failure, with its completion; empty without one.
    """

    values: tuple[Hashable | None, ...]
    read: tuple[bool, ...]
    cause: str = ""


def read_answers(extract: Callable[[str], Hashable] | None, texts: Sequence[str]) -> Answers:
    """Looks for the answer in each completion. One that raises, or is not hashable, costs its sample alone.

    Args:
        extract: as the user wrote it; None for no vote.
        texts: the completions.
    """
    if extract is None:
        return Answers(values=(None,) * len(texts), read=(True,) * len(texts))
    values: list[Hashable | None] = []
    causes: list[str] = []
    for text in texts:
        value, cause = _read(extract, text)
        values.append(value)
        causes.append(cause)
    first = next((cause for cause in causes if cause), "")
    return Answers(values=tuple(values), read=tuple(not cause for cause in causes), cause=first)


def _read(extract: Callable[[str], Hashable], text: str) -> tuple[Hashable | None, str]:
    """An answer, and why there is none if it is the function's fault."""
    try:
        value = extract(text)
    except Exception as error:  # noqa: BLE001  code of the user, whose failure costs a sample and not the run
        lines = traceback.format_exc().rstrip()
        return None, f"raised {type(error).__name__}: {error} for completion {text!r:.1000}\n{lines}"
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
    """Warns once of the answers of an evaluation that could not be found.

    Args:
        name: of the evaluation.
        number: how many, on this rank.
        cause: of the first.
    """
    if cause:
        warnings.warn(
            f'answer of evaluation "{name}" failed on {number} samples, which do not vote: it {cause}', stacklevel=2
        )
