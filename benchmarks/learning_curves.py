"""Learning curves of the library and TRL on the same prompts in the same order, where each side samples for itself.

    python benchmarks/against_trl.py --model FOLDER --cells sampled
    python benchmarks/learning_curves.py     # draws its results to docs/learning_against_trl.png

A seed sets the prompts of both sides and their random numbers. Steps of a seed are correlated over its whole length,
because the weights of a step depend on all samples before it. So a seed is one measurement: the difference is that of
the rewards' means over its steps, and the standard error of n seeds is their standard deviation over the root of n.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from measure import RESULTS, ROOT, Report
from sides import Cell, side

NAME = "against_trl_model"
SIDES = LIBRARY, TRL = "library", "TRL"
POINTS = "reward of each step"
PICTURE = ROOT / "docs" / "learning_against_trl.png"
LAST = 8

Point = Mapping[str, Any]
"""Seed, step, and the mean reward, CPU seconds and peak memory of each side."""


class Difference(NamedTuple):
    """Mean over seeds of a paired difference, and its standard error."""

    mean: float
    error: float


def difference(points: Sequence[Point]) -> Difference:
    """Return the reward of the library minus that of TRL."""
    seeds = [mean_of(LIBRARY, own) - mean_of(TRL, own) for own in by_seed(points)]
    return Difference(fmean(seeds), stdev(seeds) / len(seeds) ** 0.5)


def by_seed(points: Sequence[Point]) -> list[list[Point]]:
    """Return the points of each seed."""
    return [list(own) for _, own in groupby(points, key=lambda point: point["seed"])]


def mean_of(name: str, points: Sequence[Point]) -> float:
    """Return the mean reward of a side."""
    return fmean(point[name] for point in points)


def learn(report: Report, cell: Cell, python: Path, seeds: int) -> None:
    """Add the curves of a cell, their difference, and the seconds and memory of both sides."""
    points = [point for seed in range(seeds) for point in train(cell._replace(seed=seed), python)]
    report.tables[POINTS] = points
    rows = [
        (
            own[0]["seed"],
            *(f"{mean_of(name, own):.3f}, {mean_of(name, own[-LAST:]):.3f}" for name in SIDES),
            f"{mean_of(LIBRARY, own) - mean_of(TRL, own):.4f}",
        )
        for own in by_seed(points)
    ]
    report.rows(f"{cell.title}: reward, all steps and last {LAST}", ("seed", *SIDES, "difference"), rows)
    mean, error = difference(points)
    report.rows(f"{cell.title}: library - TRL", ("mean", "error", "seeds"), [(f"{mean:.4f}", f"{error:.4f}", seeds)])
    costs = [(name, *(f"{figure:.2f}" for figure in cost(name, points))) for name in SIDES]
    report.rows(f"{cell.title}: costs", ("", "CPU seconds of a step", "of all steps", "peak GiB"), costs)
    last = mean_of(LIBRARY, [point for own in by_seed(points) for point in own[-LAST:]])
    report.floor(f"learning: reward of the library, last {LAST} steps", last, at_least=0.8)
    report.bound("learning: standard error of library - TRL", error, at_most=0.03)
    report.bound("learning: |library - TRL| in standard errors", abs(mean) / error, at_most=2.5)


def cost(name: str, points: Sequence[Point]) -> tuple[float, float, float]:
    """Return the median and the sum of a side's CPU seconds, and its peak memory."""
    seconds = [point[f"{name} CPU"] for point in points]
    return median(seconds), sum(seconds), max(point[f"{name} peak"] for point in points) / 2**30


def train(cell: Cell, python: Path) -> Iterator[Point]:
    """Yield the points of a seed, whose steps the sides make in turn."""
    with side(python, "side_of_trl.py", cell) as trl, side(Path(sys.executable), "side_of_library.py", cell) as library:
        for step in range(cell.rollouts):
            point: dict[str, Any] = {"seed": cell.seed, "step": step}
            for name, own in zip(SIDES, (library, trl), strict=True):
                own.step()
                seconds = own.seconds["whole"].cpu[-1]
                point |= {name: own.rewards[-1], f"{name} CPU": seconds, f"{name} peak": own.peak}
            print(json.dumps(point), flush=True)
            yield point


def draw(points: Sequence[Point], picture: Path) -> None:
    """Draw each seed's curves, and their means."""
    from matplotlib.figure import Figure  # optional dependency

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    seeds = by_seed(points)
    for name, color in zip(SIDES, ("tab:blue", "tab:orange"), strict=True):
        curves = [[point[name] for point in own] for own in seeds]
        for curve in curves:
            axes.plot(curve, color=color, linewidth=0.8, alpha=0.4)
        label = {LIBRARY: "lightning-rl"}.get(name, name)
        axes.plot([fmean(step) for step in zip(*curves, strict=True)], color=color, linewidth=2.2, label=label)
    axes.set(xlabel="optimizer step", ylabel="mean reward of 64 responses", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, title=f"mean of {len(seeds)} seeds")
    figure.savefig(picture, format="png", dpi=150)


if __name__ == "__main__":
    draw(json.loads((RESULTS / f"{NAME}.json").read_text())["tables"][POINTS], PICTURE)
    print(f"written: {PICTURE.relative_to(ROOT)}")
