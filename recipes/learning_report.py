"""Report of a recipe on a laptop: held-out accuracy and completions before and after the fit, and a learning curve."""

import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer

from lightning_rl import PromptDataModule, RLLightningModule

if TYPE_CHECKING:
    from rich.table import Table

PACKAGES = ("matplotlib", "rich")
SHOWN = 8  # rows of the table
GREEDY, SAMPLED = "val/reward/task", "val/sampled/reward/task"
CURVES: dict[str, dict[str, Any]] = {
    "reward/task": {"label": "training, sampled", "color": "tab:orange", "linewidth": 1.0},
    SAMPLED: {"label": "held out, sampled", "color": "tab:green", "linewidth": 2.0, "marker": "s"},
    GREEDY: {"label": "held out, greedy", "color": "tab:blue", "linewidth": 2.0, "marker": "o"},
}


@contextmanager
def report(
    trainer: Trainer,
    module: RLLightningModule,
    data: PromptDataModule,
    *,
    rows: Sequence[Mapping[str, Any]],
    right: Callable[[str, Any], float],
    title: str,
) -> Iterator[None]:
    """Print greedy completions and accuracy on held-out prompts before and after a fit, and plot the learning curve.

    If the module has an evaluation named ``sampled``, its accuracy is printed too. The last line has the greedy one.

    Args:
        trainer: Trainer of the fit.
        module: Module that is trained.
        data: Data of the fit, with ``rows`` as validation prompts.
        rows: Held-out rows with the columns ``prompt`` (text or chat) and ``answer``.
        right: Function (completion, answer) -> 1 or True if the completion is right, else 0 or False.
        title: Title of the table and of the plot.

    Raises:
        SystemExit: If a package is missing, or if optimizer steps and devices do not divide the prompts of a rollout.
    """
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        raise SystemExit(f"expected {' and '.join(missing)} for the report: pip install 'lightning-rl[report]'")
    prompts, parts = data.prompts_per_rollout, module.options.minibatches_per_rollout * trainer.world_size
    if prompts % parts:
        shares = [str(number) for number in range(1, prompts + 1) if prompts % number == 0]
        raise SystemExit(f"expected updates of a rollout x devices to be one of {', '.join(shares)}, got {parts}")
    shown = [dict(row) for row in rows[:SHOWN]]
    before, first = _accuracies(trainer, module, data), module.generate(shown)
    yield
    after, last = _accuracies(trainer, module, data), module.generate(shown)
    folder = Path(trainer.log_dir or ".")  # a collective
    if not trainer.is_global_zero:
        return
    learning_curve(folder / "metrics.csv", folder / "learning_curve.png", title)
    from rich.console import Console

    Console().print(completion_table(shown, first, last, right=right, title=title))
    figures = [f"{name} before={before[name]:.3f} after={after[name]:.3f}\n" for name in before]
    sys.stdout.write(f"metrics and learning_curve.png: {folder}\n{''.join(figures)}")


def _accuracies(trainer: Trainer, module: RLLightningModule, data: PromptDataModule) -> dict[str, float]:
    """Return the accuracies on held-out prompts by the names of the report, the greedy one last."""
    metrics: dict[str, float] = {}
    for part in trainer.validate(module, data, verbose=False):
        metrics |= part
    return {name: metrics[key] for name, key in (("sampled", SAMPLED), ("accuracy", GREEDY)) if key in metrics}


def learning_curve(csv_path: str | Path, picture_path: str | Path, title: str) -> None:
    """Plot reward and held-out accuracy over optimizer steps, as a PNG.

    Args:
        csv_path: ``metrics.csv`` of Lightning's ``CSVLogger``, with the column ``step`` and some of :data:`CURVES`;
            blank cells are skipped.
        picture_path: Path of the PNG.
        title: Title of the plot.
    """
    from matplotlib.figure import Figure  # optional dependency

    with Path(csv_path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")  # uses Agg, because pyplot is not involved
    axes = figure.subplots()
    for column, style in CURVES.items():
        if points := [(int(row["step"]), float(row[column])) for row in rows if row.get(column)]:
            axes.plot([step for step, _ in points], [value for _, value in points], **style)
    axes.set(title=title, xlabel="optimizer step", ylabel="fraction right", ylim=(0, 1.03))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(picture_path, format="png", dpi=150)


def completion_table(
    rows: Sequence[Mapping[str, Any]],
    before: Sequence[str],
    after: Sequence[str],
    *,
    right: Callable[[str, Any], float],
    title: str,
) -> "Table":
    """Return a table of prompts and the completions of two policies, each marked ``ok`` or ``x``."""
    from rich.table import Table  # optional dependency
    from rich.text import Text

    table = Table("prompt", "before", "after", title=title)
    for row, *completions in zip(rows, before, after, strict=True):
        marks = [(text, right(text, row["answer"])) for text in completions]
        cells = [Text(f"ok  {text}", style="green") if ok else Text(f"x   {text}", style="red") for text, ok in marks]
        table.add_row(Text(_text(row["prompt"])), *cells)
    return table


def _text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt, or the last message of a chat, with [image] for a picture."""
    content = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return content if isinstance(content, str) else " ".join(part.get("text", f"[{part['type']}]") for part in content)
