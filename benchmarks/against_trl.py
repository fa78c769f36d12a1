"""A whole GRPO step through ``Trainer.fit``, with every metric and a CSV row, against that of a tuned TRL 1.16.

    make bench-trl                       # makes the environment of TRL, once
    python benchmarks/against_trl.py
    python benchmarks/against_trl.py --quick true
    python benchmarks/against_trl.py --model FOLDER    # a pretrained model: its learning curves, and the lengths

Each side is a process with one thread; they alternate step by step. Both train the same model on the same prompts in
float32, and sample a scripted number of tokens per row; the numbers of sampled and trained tokens must be equal.
Phases: generation; scoring, the rest of the rollout; update, loss, gradient and optimizer step; other, the rest of
the step.
"""

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from jsonargparse import auto_cli
from learning_curves import LIBRARY as OURS
from learning_curves import NAME as OF_MODEL
from learning_curves import TRL, learn
from measure import MIN_ROUNDS, ROOT, Report, Seconds
from sides import PHASES, WARM, Cell, side
from workload import Lengths

FOUR = "library, four corrections"
VERSIONS = 'import json, importlib.metadata as m; print(json.dumps({f"{n} of TRL": m.version(n) for n in NAMES}))'


class Bar(NamedTuple):
    """Lower bound on the time of TRL relative to the library for a cell, and the use of four corrections."""

    at_least: float
    cell: Cell
    corrections: bool = False


BARS = (
    Bar(1.15, Cell("1M", "equal", 32, 64), corrections=True),
    Bar(2.3, Cell("1M", "geometric", 32, 64)),
    Bar(3.5, Cell("1M", "90/10", 32, 64)),
    Bar(1.0, Cell("1M", "equal", 8, 64)),
    Bar(2.0, Cell("1M", "equal", 8, 512)),
    Bar(1.0, Cell("1M", "equal", 2, 1024)),
    Bar(1.25, Cell("10M", "equal", 16, 64)),
    Bar(2.6, Cell("10M", "geometric", 16, 64)),
    Bar(1.0, Cell("10M", "90/10", 16, 64)),
)
MIXES: tuple[Lengths, ...] = ("equal", "geometric", "90/10")
QUICK = tuple(Bar(1.0, Cell("1M", kind, 4, 16), corrections=True) for kind in ("equal", "90/10"))


def of_model(folder: str, *, quick: bool) -> tuple[Cell, Sequence[Bar]]:
    """Return the cell whose curves are compared, and those of the lengths."""
    learning = Cell(folder, "sampled", 8, 16, rollouts=2 if quick else 32, rate=1e-5, trl_microbatches=4)
    prompts, longest = (2, 8) if quick else (4, 32)
    return learning, [Bar(1.0, Cell(folder, lengths, prompts, longest)) for lengths in MIXES]


def compare(report: Report, bar: Bar, python: Path, rounds: int) -> None:
    """Add the tables and bounds of a cell."""
    cell = bar.cell
    with ExitStack() as stack:
        sides = {TRL: stack.enter_context(side(python, "side_of_trl.py", cell))}
        for name in (OURS, FOUR) if bar.corrections else (OURS,):
            own = side(Path(sys.executable), "side_of_library.py", cell, corrections=name == FOUR)
            sides[name] = stack.enter_context(own)
        for _ in range(WARM + rounds):
            for each in sides.values():
                each.step()
    whole = {name: each.tail("whole", rounds) for name, each in sides.items()}
    report.table(f"{cell.title}: {sides[TRL].expected} tokens", whole, base=TRL)
    rows: list[Any] = [
        (name, *(f"{median(each.tail(phase, rounds).cpu):.4f}" for phase in PHASES), f"{each.peak / 2**30:.2f}")
        for name, each in sides.items()
    ]
    report.rows(f"{cell.title}: CPU seconds by phase", ("", *PHASES, "peak GiB"), rows)
    report.bound(f"{cell.title}: peak memory, library / TRL", sides[OURS].peak / sides[TRL].peak, at_most=1.0)
    for name in list(whole)[1:]:
        of_trl = whole[TRL].of_all(whole[name])
        report.rows(f"{cell.title}: TRL / {name}", ("", "median", "least", "most"), list(_spread(of_trl)))
    report.floor(f"{cell.title}: CPU, TRL / library", median(whole[TRL].of_all(whole[OURS]).cpu), at_least=bar.at_least)
    if bar.corrections:
        cost = median(whole[FOUR].of_all(whole[OURS]).cpu)
        report.bound(f"{cell.title}: CPU, four corrections / none", cost, at_most=1.02)


def _spread(ratios: Seconds) -> Iterator[Sequence[str]]:
    for name, values in ratios._asdict().items():
        yield name, *(f"{value:.3f}" for value in (median(values), min(values), max(values)))


def versions(python: Path) -> dict[str, str]:
    """Return the packages in TRL's environment.

    Raises:
        FileNotFoundError: if there is none.
    """
    if not python.exists():
        raise FileNotFoundError(f"expected an environment with TRL at {python}: make bench-trl makes it")
    code = VERSIONS.replace("NAMES", str(["trl", "transformers", "torch"]))
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


def main(
    *,
    rounds: int = MIN_ROUNDS,
    quick: bool = False,
    cells: str = "",
    model: Path | None = None,
    seeds: int = 3,
    trl_python: Path = ROOT / ".venv-trl/bin/python",
) -> None:
    """Compare all cells, or those whose title contains a text; of a model, if there is one, with learning curves."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if rounds < MIN_ROUNDS:
        raise ValueError(f"expected at least {MIN_ROUNDS} rounds, got {rounds}")
    report = Report(OF_MODEL if model else "against_trl", versions(trl_python))
    bars = QUICK if quick else BARS
    if model:
        learning, bars = of_model(str(model.resolve()), quick=quick)
        if cells in learning.title:
            learn(report, learning, trl_python, seeds)
    for bar in bars:
        if cells in bar.cell.title:
            compare(report, bar, trl_python, rounds)
    report.finish()


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
