"""A whole GRPO step through ``Trainer.fit`` against a bare loop, which computes the same and nothing else.

    python benchmarks/bound.py
    python benchmarks/bound.py --model FOLDER
    python benchmarks/bound.py --model FOLDER --cells 90/10
    python benchmarks/bound.py --model FOLDER --cells growth    # draws docs/growth.png

The bare loop is in `bare.py`. Its gradient is compared with the library's first. Then each side is a process with one
thread, and they alternate step by step, as in `against_trl.py`. Both train the same model on the same prompts in
float32 and sample a scripted number of tokens per row; the numbers of sampled and trained tokens must be equal. Growth:
steps of 4 x 8 responses of equal length; an exponent is the slope of log seconds over log length.
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from against_trl import MIXES
from bare import add_gradient, decode, microbatches_of, prepare, rollout_of
from growth import exponent
from jsonargparse import auto_cli
from measure import MIN_ROUNDS, ROOT, Report
from side_of_bare import MAX_TOKENS, prompts_of, rewards_of
from sides import PHASES, WARM, Cell, Side, side
from torch import Tensor
from workload import workload

from lightning_rl import GRPO, ClippedSurrogate, token_mean
from lightning_rl.algorithm import Algorithm
from lightning_rl.corrections import Corrections
from lightning_rl.policy import PolicyModel
from lightning_rl.update import accumulate_gradient

BARE, LIBRARY = "bare loop", "lightning-rl"
SIDES = {BARE: "side_of_bare.py", LIBRARY: "side_of_library.py"}
LENGTHS = (8, 16, 32, 64)
GROWN = ("generation", "update")
PICTURE = ROOT / "docs" / "growth.png"


def gradient_difference(cell: Cell) -> float:
    """Return the largest difference of a weight's gradient between library and bare loop, relative to the norm."""
    work = workload(**cell._asdict())
    model, prompts = work.model.eval(), prompts_of(work)[: cell.prompts]
    prepare(model)
    drawn = decode(model, prompts, cell.group, lengths=work.lengths, longest=cell.longest, eos=work.eos)
    rows = [row for row in work.rows[: cell.prompts] for _ in range(cell.group)]
    rollout = rollout_of(prompts, drawn, rewards_of(work, drawn.responses, rows), cell.group)
    microbatches = microbatches_of(rollout, MAX_TOKENS)
    add_gradient(model, rollout, microbatches)
    bare = take_gradient(model)
    policy = PolicyModel(model, None, temperature=1.0, packed=True)
    corrections = Corrections([])
    algorithm = Algorithm(loss=ClippedSurrogate(), advantages=GRPO(), reduction=token_mean, corrections=corrections)
    accumulate_gradient(
        rollout,
        microbatches,
        lambda microbatch: policy(microbatch.layout),
        algorithm,
        backward=lambda loss: loss.backward(),
    )
    norm = torch.stack([gradient.norm() for gradient in bare]).norm()
    pairs = zip(take_gradient(model), bare, strict=True)
    return max(float((own - other).norm() / norm) for own, other in pairs)


def take_gradient(model: torch.nn.Module) -> list[Tensor]:
    """Return the gradients of all weights, and clear them."""
    gradients = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    return gradients


def measure(cells: Mapping[str, tuple[str, Cell]], rounds: int) -> dict[str, Side]:
    """Run each side of a cell, in turn; return them by name."""
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(side(Path(sys.executable), SIDES[kind], cell, corrections=False))
            for name, (kind, cell) in cells.items()
        }
        for _ in range(WARM + rounds):
            for each in sides.values():
                each.step()
    return sides


def compare(report: Report, cell: Cell, rounds: int) -> None:
    """Add the tables and bounds of a cell."""
    difference = gradient_difference(cell)
    report.bound(f"{cell.title}: difference of gradients, of the norm", difference, at_most=1e-4)
    sides = measure({name: (name, cell) for name in SIDES}, rounds)
    bare, library = sides[BARE], sides[LIBRARY]
    whole = {name: each.tail("whole", rounds) for name, each in sides.items()}
    report.table(f"{cell.title}: {bare.expected} tokens", whole, base=BARE)
    rows: list[Any] = [
        (name, *(f"{median(each.tail(phase, rounds).cpu):.4f}" for phase in PHASES), f"{each.peak / 2**30:.2f}")
        for name, each in sides.items()
    ]
    report.rows(f"{cell.title}: CPU seconds by phase", ("", *PHASES, "peak GiB"), rows)
    for phase, at_most in (("whole", 1.05), ("update", 1.08)):
        ratio = median(library.tail(phase, rounds).of_all(bare.tail(phase, rounds)).cpu)
        report.bound(f"{cell.title}: CPU, {phase}, library / bare loop", ratio, at_most=at_most)
    report.bound(f"{cell.title}: peak memory, library / bare loop", library.peak / bare.peak, at_most=1.1)


def grow(report: Report, size: str, lengths: Sequence[int], rounds: int) -> None:
    """Add the seconds of each response length, their exponents, and a picture."""
    grown = [  # one length at a time, for memory
        measure({name: (name, Cell(size, "equal", 4, length)) for name in SIDES}, rounds) for length in lengths
    ]
    cpu = {
        (name, phase): [median(sides[name].tail(phase, rounds).cpu) for sides in grown]
        for name in SIDES
        for phase in GROWN
    }
    rows = [(length, *(f"{seconds[place]:.3f}" for seconds in cpu.values())) for place, length in enumerate(lengths)]
    slopes = [exponent(lengths, seconds) for seconds in cpu.values()]
    head = ("tokens", *(f"{name}, {phase}" for name, phase in cpu))
    title = f"{Path(size).name}: CPU seconds of 4 x 8 responses of equal length"
    report.rows(title, head, [*rows, ("exponent", *(f"{slope:.2f}" for slope in slopes))])
    draw(lengths, cpu, PICTURE)
    print(f"written: {PICTURE.relative_to(ROOT)}")


def draw(lengths: Sequence[int], cpu: Mapping[tuple[str, str], Sequence[float]], picture: Path) -> None:
    """Draw seconds over response length, both axes logarithmic."""
    from matplotlib.figure import Figure  # optional dependency

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for (name, phase), seconds in cpu.items():
        color, style = ("tab:blue" if name == LIBRARY else "tab:gray"), ("-" if phase == "update" else "--")
        axes.plot(lengths, seconds, style, marker="o", color=color, label=f"{name}, {phase}")
    axes.set(xscale="log", yscale="log", xlabel="tokens of a response", ylabel="CPU seconds of a step")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(picture, format="png", dpi=150)


def main(*, rounds: int = MIN_ROUNDS, quick: bool = False, cells: str = "", model: Path | None = None) -> None:
    """Compare all cells, or those whose title contains a text; growth if it is asked for."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report = Report("bound_model" if model else "bound")
    size = str(model.resolve()) if model else "1M"
    prompts, longest = (2, 8) if quick else (4, 32) if model else (32, 64)
    for lengths in MIXES:
        cell = Cell(size, lengths, prompts, longest)
        if cells in cell.title:
            compare(report, cell, rounds)
    if cells == "growth":
        grow(report, size, LENGTHS, rounds)
    report.finish()


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
