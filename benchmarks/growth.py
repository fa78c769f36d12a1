"""Growth of step time and peak memory with samples, response length and parameters: fitted exponents.

    python benchmarks/growth.py

Steps of GRPO through ``Trainer.fit`` with every metric, each size in a process, lengths equal. An exponent
is the slope of log seconds over log size, by least squares: 1 means linear growth, less a fixed
part. Attention grows with the square of the length. Peak memory of the process must be constant from 512 samples on,
which decode together.
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import log
from pathlib import Path
from statistics import linear_regression, median

import torch
from jsonargparse import auto_cli
from measure import MIN_ROUNDS, Report
from sides import PHASES, Cell, Side, side
from transformers import Qwen2ForCausalLM
from workload import SIZES, qwen2

SAMPLES, LENGTHS = (64, 256, 512, 1024, 4096), (32, 128, 512, 2048)
PARAMETERS = ("width 64", "1M", "width 256", "10M")
FULL = 512  # rows that decode together
NAMES = ("whole", *PHASES[:-1])


def measure(cells: Mapping[int, Cell], rounds: int) -> dict[int, Side]:
    """Steps of each cell, in turn, after one that warms up."""
    sides = dict[int, Side]()
    with ExitStack() as stack:
        for size, cell in cells.items():
            sides[size] = stack.enter_context(side(Path(sys.executable), "side_of_library.py", cell))
        for _ in range(1 + rounds):
            for each in sides.values():
                each.step()
    return sides


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Of ``value = c size^exponent``."""
    return linear_regression([log(size) for size in sizes], [log(value) for value in values]).slope


def table(report: Report, what: str, sides: Mapping[int, Side], rounds: int) -> dict[str, float]:
    """Add CPU seconds and memory of each size; returns the exponents of the seconds."""
    sizes = list(sides)
    cpu = {name: [median(each.tail(name, rounds).cpu) for each in sides.values()] for name in NAMES}
    exponents = {name: exponent(sizes, values) for name, values in cpu.items()}
    rows = [
        (size, *(f"{cpu[name][place]:.3f}" for name in NAMES), f"{each.peak / 2**20:.0f}")
        for place, (size, each) in enumerate(sides.items())
    ]
    slopes = ("exponent", *(f"{value:.2f}" for value in exponents.values()), "")
    report.rows(f"CPU seconds by {what}", (what, *NAMES, "peak MiB"), [*rows, slopes])
    return exponents


def parameters(name: str) -> int:
    """Of a model."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in Qwen2ForCausalLM(qwen2(SIZES[name])).parameters())


def main(*, rounds: int = MIN_ROUNDS, quick: bool = False) -> None:
    """Print a table for each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report, part = Report("growth"), slice(2) if quick else slice(None)

    sides = measure({rows: Cell("width 64", "equal", rows // 8, 32) for rows in SAMPLES[part]}, rounds)
    found = table(report, "samples", sides, rounds)
    report.bound("exponent of a step in samples", found["whole"], at_most=1.02)
    full, most = min(FULL, max(sides)), max(sides)
    report.bound(f"peak memory of {most} samples, of {full}", sides[most].peak / sides[full].peak, at_most=1.1)

    sides = measure({length: Cell("width 64", "equal", 2, length) for length in LENGTHS[part]}, rounds)
    found = table(report, "response length", sides, rounds)
    report.bound("exponent of a step in response length", found["whole"], at_most=1.5)

    sides = measure({parameters(name): Cell(name, "equal", 4, 32) for name in PARAMETERS[part]}, rounds)
    found = table(report, "parameters", sides, rounds)
    report.bound("exponent of a step in parameters", found["whole"], at_most=1.02)
    report.finish()


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
