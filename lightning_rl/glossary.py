"""Glossary: meaning, population, unit and normal range of each metric.

The source is ``glossary.toml``. The report shows it beside each curve, and ``python -m
lightning_rl.glossary`` writes the table of docs/metrics.md.
"""

import re
import sys
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
PLACEHOLDER = re.compile(r"<\w+>")
MANY = {"<metric>": ".+", "<stage>": ".+", "@k": r"@\d+(_(low|high))?", "@n": r"@\d+(_(low|high))?"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Description of one or more metrics.

    Attributes:
        names: Names, with placeholders such as ``<function>``.
        meaning: One clause in Markdown.
        population: Samples, tokens or steps that the metric covers; empty if none.
        unit: Unit; empty if none.
        normal: Values of a healthy run; empty if unknown.
        low: Smallest normal value, or None.
        high: Largest normal value, or None; added to ``baseline`` if given.
        baseline: Metric that is added to ``high``, or None; it has no bound here.
        alive: A value of 0 at every step of a run is not normal.
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
        """Return True if a value is outside of the normal range, given the ``baseline`` at the same step.

        ``high`` is also a share of the baseline, so that rounding of a large baseline does not count.
        """
        top = None if self.high is None else self.high + baseline * (1 + self.high if self.baseline else 0)
        return (self.low is not None and value < self.low) or (top is not None and value > top)

    def to_json(self) -> Mapping[str, str | float | bool | None]:
        """Return the JSON values that a report shows beside a curve."""
        meaning, normal = (LINK.sub(r"\1", text).replace("`", "") for text in (self.meaning, self.normal))
        fields = {"meaning": meaning, "normal": normal, "population": self.population, "unit": self.unit}
        return {**fields, "low": self.low, "high": self.high, "baseline": self.baseline, "alive": self.alive}


@cache
def glossary() -> tuple[Entry, ...]:
    """Return every entry in page order; the first matching entry applies."""
    text = (files("lightning_rl") / "glossary.toml").read_text(encoding="utf-8")
    return tuple(Entry(**each | {"names": tuple(each["names"])}) for each in tomllib.loads(text)["metric"])


def entry_of(metric: str) -> Entry | None:
    """Return the entry of a metric, or None if neither the core nor a callback logs the name.

    Example:
        >>> entry_of("kl/rollout").unit, entry_of("reward/exactly_sorted").population
        ('nats', 'rewarded rows to which the function applies')
    """
    return next((entry for pattern, entry in _patterns() if pattern.fullmatch(metric)), None)


def table() -> str:
    """Return the table of docs/metrics.md."""
    lines = ["| metric | meaning | population | unit | normal |", "|---|---|---|---|---|"]
    for entry in glossary():
        names = ", ".join(f"`{name}`" for name in entry.names)
        lines.append("| " + " | ".join((names, entry.meaning, entry.population, entry.unit, entry.normal)) + " |")
    return "\n".join(lines) + "\n"


def can_exist(metric: str, names: Mapping[str, Collection[str]]) -> bool:
    """Return True if a run can have a metric.

    Args:
        metric: Name of the metric.
        names: Names in this run for placeholders.

    Example:
        >>> names = {"<function>": ["right"], "<callback>": ["no_eos"]}
        >>> [can_exist(name, names) for name in ("reward/right", "reward/wrong", "no_eos/excluded", "opsm/excluded")]
        [True, False, True, False]
    """
    known = {mark: f"({'|'.join(map(re.escape, some))})" for mark, some in names.items()}
    return any(pattern.fullmatch(metric) for pattern, _ in _compile(known))


def examples(names: Mapping[str, Collection[str]]) -> list[str]:
    """Return names of metrics for a message, with the names in this run for placeholders."""
    found = [name for entry in glossary() for name in entry.names]
    for mark, some in names.items():
        found = [name.replace(mark, one) for name in found for one in (some if mark in name else ("",))]
    return [name for name in found if not PLACEHOLDER.search(name)]


@cache
def _patterns() -> list[tuple[re.Pattern[str], Entry]]:
    return _compile({})


def _compile(marks: Mapping[str, str]) -> list[tuple[re.Pattern[str], Entry]]:
    patterns: list[tuple[re.Pattern[str], Entry]] = []
    for entry in glossary():
        for pattern in map(re.escape, entry.names):
            for mark, matches in {**marks, **MANY}.items():
                pattern = pattern.replace(mark, matches)
            patterns.append((re.compile(PLACEHOLDER.sub("[^/]+", pattern)), entry))
    return patterns


if __name__ == "__main__":
    sys.stdout.write(table())
