"""Glossary: what each metric is, of which population, in which unit, and what is normal.

The one table of them lies in ``assets/glossary.toml``: the report shows it beside each curve, and ``python -m
lightning_rl.reporting.glossary`` writes the table of docs/metrics.md from it.
"""

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
PLACEHOLDER = re.compile(r"<\w+>")
MANY = {"<figure>": ".+", "<stage>": ".+", "@k": r"@\d+(_(low|high))?", "@n": r"@\d+(_(low|high))?"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is known about some metrics.

    Attributes:
        names: with placeholders such as ``<function>`` for what depends on the run.
        meaning: one clause, in Markdown.
        population: what it is a figure of; empty for a number of its own.
        unit: empty for a number without one.
        normal: what a sound run shows; empty where nothing can be said.
        low: the least that is normal, if that is a number.
        high: the most that is normal, if that is a number; on top of ``baseline``, if there is one.
        baseline: another metric, which may be as large as it likes and this one with it.
        alive: whether it is beyond what is normal to be 0 at every step of a run.
    """

    names: tuple[str, ...]
    meaning: str
    population: str = ""
    unit: str = ""
    normal: str = ""
    low: float | None = None
    high: float | None = None
    baseline: str = ""
    alive: bool = False

    def is_beyond(self, value: float, baseline: float = 0.0) -> bool:
        """Whether one value is beyond what is normal, given that of ``baseline`` at the same step, 0 if there is none.

        ``high`` is a share of the baseline too, so that rounding of a large one does not count.
        """
        top = None if self.high is None else self.high + baseline * (1 + self.high if self.baseline else 0)
        return (self.low is not None and value < self.low) or (top is not None and value > top)

    def to_json(self) -> Mapping[str, str | float | bool | None]:
        """What a report shows beside a curve, as plain text."""
        meaning, normal = (LINK.sub(r"\1", text).replace("`", "") for text in (self.meaning, self.normal))
        fields = {"meaning": meaning, "normal": normal, "population": self.population, "unit": self.unit}
        return {**fields, "low": self.low, "high": self.high, "baseline": self.baseline, "alive": self.alive}


@cache
def glossary() -> tuple[Entry, ...]:
    """Every entry, in the order of the page; the first one with a name that fits counts."""
    text = (files("lightning_rl.reporting") / "assets" / "glossary.toml").read_text(encoding="utf-8")
    return tuple(Entry(**{**each, "names": tuple(each["names"])}) for each in tomllib.loads(text)["metric"])


def entry_of(metric: str) -> Entry | None:
    """What is known about a metric; None for a name that neither the core nor a callback logs under.

    Example:
        >>> entry_of("kl/rollout").unit, entry_of("reward/exactly_sorted").population
        ('nats', 'rewarded rows that it applies to')
    """
    return next((entry for pattern, entry in _patterns() if pattern.fullmatch(metric)), None)


def table() -> str:
    """The table of docs/metrics.md."""
    lines = ["| metric | meaning | population | unit | normal |", "|---|---|---|---|---|"]
    for entry in glossary():
        names = ", ".join(f"`{name}`" for name in entry.names)
        lines.append("| " + " | ".join((names, entry.meaning, entry.population, entry.unit, entry.normal)) + " |")
    return "\n".join(lines) + "\n"


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Entry], ...]:
    return tuple(_compile())


def _compile() -> Iterator[tuple[re.Pattern[str], Entry]]:
    for entry in glossary():
        for name in entry.names:
            pattern = re.escape(name)
            for mark, matches in MANY.items():
                pattern = pattern.replace(mark, matches)
            yield re.compile(PLACEHOLDER.sub("[^/]+", pattern)), entry


if __name__ == "__main__":
    sys.stdout.write(table())
