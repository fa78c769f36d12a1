"""Option: one option of another trainer, and what becomes of it here, as plain data."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from typing import Any, Literal

Verdict = Literal["same", "different", "refused"]


@dataclass(frozen=True, slots=True)
class Option:
    """One option of another trainer.

    Attributes:
        name: as the other trainer writes it.
        default: what it is when nobody sets it; a refused option is fine as long as it is this.
        verdict: ``"same"`` if it is translated and means the same, ``"different"`` if ``says`` has to be known,
            ``"refused"`` if any other value than the default ends the translation.
        ours: where it goes, as code in Markdown; empty if there is nothing to set.
        says: how it differs, or why it is refused and what to do instead; empty for ``"same"``.
    """

    name: str
    default: Any
    verdict: Verdict
    ours: str = ""
    says: str = ""


def same(name: str, default: Any, ours: str) -> Option:
    """An option that means here what it means there."""
    return Option(name, default, "same", ours)


def different(name: str, default: Any, ours: str, says: str) -> Option:
    """An option that is translated or left out, with something to know about it."""
    return Option(name, default, "different", ours, says)


def refusal(name: str, default: Any, says: str) -> Option:
    """An option that has to keep its default."""
    return Option(name, default, "refused", "", says)


def table(options: Iterable[Option]) -> Mapping[str, Option]:
    """Options by name.

    Raises:
        ValueError: if a name stands there twice.
    """
    rows = tuple(options)
    by_name = {option.name: option for option in rows}
    if len(by_name) < len(rows):
        raise ValueError("expected each option once")
    return by_name


def as_number(value: Any, option: Option) -> Any:
    """A text that is a number where the option is one: YAML reads ``1e-6``, without a point, as text."""
    if not isinstance(value, str) or isinstance(option.default, bool) or not isinstance(option.default, int | float):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def expected_kind(value: Any, default: Any) -> str | None:
    """What an option with such a default holds, if a plain value is nothing of the kind."""
    if not isinstance(value, bool | int | float | str | list | dict):
        return None
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if not isinstance(default, int | float):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return "a number"
    whole = isinstance(default, float) or value < 1 or value == int(value)
    return None if whole else "a whole number"


class RefusedError(Exception):
    """What a configuration asks for and cannot get.

    Attributes:
        reasons: from the name of each refused option to the reason.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        super().__init__("\n".join(f"{name}: {reason}" for name, reason in self.reasons.items()))


class Settings:
    """The options of a configuration over the defaults of a table, and what is found out about them on the way.

    Args:
        options: the table.
        values: what the configuration sets.
        unknown: why a name that is not in the table is refused.

    Attributes:
        notes: from the name of an option to what has to be known about it.
        reasons: from the name of a refused option to the reason.
    """

    def __init__(self, options: Mapping[str, Option], values: Mapping[str, Any], unknown: str) -> None:
        self.options = options
        self.values = {
            name: as_number(value, options[name]) if name in options else value for name, value in values.items()
        }
        self.notes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        for name, value in self.values.items():
            option = options.get(name)
            if option is None:
                near = get_close_matches(name, options, n=1)
                self.reasons[name] = f"{unknown}; did you mean {near[0]}?" if near else unknown
            elif expected := expected_kind(value, option.default):
                self.reasons[name] = f"expected {expected}, got {value!r}"
            elif value == option.default and isinstance(value, bool) is isinstance(option.default, bool):
                continue
            elif option.verdict == "refused":
                self.reasons[name] = option.says
            elif option.verdict == "different":
                self.notes[name] = option.says

    def __getitem__(self, name: str) -> Any:
        """The value that the run would have."""
        return self.values.get(name, self.options[name].default)

    def refuse_below_one(self, *names: str) -> None:
        """Refuses options that count something, and do not."""
        for name in names:
            if not isinstance(self[name], int) or self[name] < 1:
                self.refuse(name, f"expected at least 1, got {self[name]!r}")

    def refuse(self, name: str, reason: str) -> None:
        """Refuses an option for a reason that its value alone does not give; the first reason stands."""
        self.reasons.setdefault(name, reason)

    def check(self) -> None:
        """Ends the translation if anything was refused.

        Raises:
            RefusedError: with every reason.
        """
        if self.reasons:
            raise RefusedError(self.reasons)
