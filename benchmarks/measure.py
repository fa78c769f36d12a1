"""Benchmark tools: alternating variants in one process, tables, bounds that can fail, and JSON.

A benchmark compares the number of tokens that each variant processes. CPU seconds exclude other load on the machine,
wall-clock seconds include it. Results are medians of at least five rounds after a warm-up.
"""

import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "bench"
PACKAGES = ("torch", "transformers", "lightning", "lightning-rl")
MIN_ROUNDS = 5

Variant = Callable[[], int]
"""Does the work once, and returns how many tokens it was."""


class Seconds(NamedTuple):
    """Wall-clock and CPU seconds of each round."""

    wall: list[float]
    cpu: list[float]

    def add(self, wall: float, cpu: float) -> None:
        """Add a round."""
        self.wall.append(wall)
        self.cpu.append(cpu)

    def of_all(self, other: "Seconds") -> "Seconds":
        """Of each round, these over those of another that took turns with it."""
        return Seconds(*([a / b for a, b in zip(*both, strict=True)] for both in zip(self, other, strict=True)))

    def tail(self, number: int) -> "Seconds":
        """Return the last rounds."""
        return Seconds(self.wall[-number:], self.cpu[-number:])


def take_turns(variants: Mapping[str, Variant], rounds: int, *, tokens: int) -> dict[str, Seconds]:
    """Return the seconds of every variant, in turn.

    Args:
        variants: by name.
        rounds: that are measured, after one that is not.
        tokens: that every variant has to work on.

    Raises:
        RuntimeError: if a variant does other work.
    """
    if rounds < MIN_ROUNDS:
        raise ValueError(f"expected at least {MIN_ROUNDS} rounds, got {rounds}")
    seconds = {name: Seconds([], []) for name in variants}
    for number in range(rounds + 1):
        for name, run in variants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            worked = run()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if worked != tokens:
                raise RuntimeError(f"expected {tokens} tokens from {name}, got {worked}")
            if number:
                seconds[name].add(wall, cpu)
    return seconds


def peak_memory() -> int:
    """Return the peak memory of this process in bytes; it never falls, so each variant needs a new process."""
    status = Path("/proc/self/status")  # what getrusage says begins with the peak of the parent
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    lines = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
    return int(lines[0].split()[1]) * 1024


def machine() -> dict[str, Any]:
    """Return machine and versions."""
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


class Report:
    """Results that a benchmark prints, and writes to ``build/bench/<name>.json``.

    Args:
        name: of the benchmark.
        facts: beside those of the machine.
    """

    def __init__(self, name: str, facts: Mapping[str, Any] | None = None) -> None:
        self.name, self.tables, self.bounds = name, dict[str, Any](), dict[str, Any]()
        facts = machine() | dict(facts or {})
        print(", ".join(f"{key} {value}" for key, value in facts.items() if value is not None))
        self._machine = facts

    def table(self, title: str, seconds: Mapping[str, Seconds], *, base: str) -> None:
        """Medians with minimum and maximum, and their ratios to one variant."""
        rows = [
            (
                name,
                *(
                    f"{median(own):.4f} [{min(own):.4f}..{max(own):.4f}] {median(own) / median(other):.3f}"
                    for own, other in zip(both, seconds[base], strict=True)
                ),
            )
            for name, both in seconds.items()
        ]
        self.rows(title, ("seconds, ratio", "CPU", "wall"), [(name, cpu, wall) for name, wall, cpu in rows])
        self.tables[title] = {name: both._asdict() for name, both in seconds.items()}

    def rows(self, title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Add a table."""
        texts = [[str(cell) for cell in row] for row in (head, *rows)]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        print(f"\n{title}")
        for row in texts:
            print("  " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        self.tables[title] = [dict(zip(head, row, strict=True)) for row in rows]

    def bound(self, what: str, value: float, *, at_most: float) -> None:
        """Record a figure with an upper bound."""
        self.bounds[what] = {"value": value, "at_most": at_most, "holds": value <= at_most}

    def floor(self, what: str, value: float, *, at_least: float) -> None:
        """Record a figure with a lower bound."""
        self.bounds[what] = {"value": value, "at_least": at_least, "holds": value >= at_least}

    def finish(self) -> None:
        """Print the bounds, write the file, and end the process with status 1 if a bound does not hold."""
        print()
        for what, bound in self.bounds.items():
            print(describe(what, bound))
        self.write()

    def write(self) -> None:
        """Write the file, and end the process with status 1 if a bound does not hold."""
        path = RESULTS / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": self._machine, "tables": self.tables, "bounds": self.bounds}
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"written: {path.relative_to(ROOT)}")
        if not all(bound["holds"] for bound in self.bounds.values()):
            sys.exit(1)


def verdict(bound: Mapping[str, Any]) -> str:
    """Of a bound, in a word."""
    return "PASS" if bound["holds"] else "FAIL"


def limit(bound: Mapping[str, Any]) -> str:
    """Of a bound, in words."""
    return f"at most {bound['at_most']:g}" if "at_most" in bound else f"at least {bound['at_least']:g}"


def describe(what: str, bound: Mapping[str, Any]) -> str:
    """Return a line with the verdict, the value and the limit of a bound."""
    return f"{verdict(bound)}  {what}: {bound['value']:.4g} ({limit(bound)})"
