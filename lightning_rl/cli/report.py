"""report: writes an HTML report from the folder of a run."""

import argparse
from collections.abc import Sequence

from lightning_rl.algorithm import Algorithm
from lightning_rl.cli.output import say
from lightning_rl.cli.recipes import load_recipe
from lightning_rl.recording.recorded_algorithm import replayable
from lightning_rl.reporting.html_report import write_report
from lightning_rl.utils.terminal import visible
from lightning_rl.utils.trainer import callbacks_of


def run(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    """Write the report and print its path.

    Returns:
        Exit code: 0 if every file could be read, 1 otherwise.

    Raises:
        SystemExit: If there is nothing to report, or if the folders are not those of one run.
    """
    if arguments.embedded < 0:
        raise SystemExit(f"expected --embedded of at least 0, got {arguments.embedded:g}")

    def algorithms(ranks: int) -> list[Algorithm]:
        recipes = [load_recipe(arguments.recipe, options) for _ in range(ranks)]
        return [replayable(recipe.module.algorithm, callbacks_of(recipe.trainer)) for recipe in recipes]

    path = arguments.output or arguments.run[0] / "report.html"
    path = path / "report.html" if path.is_dir() else path
    try:
        run = write_report(
            arguments.run,
            path,
            title=arguments.title,
            algorithms=None if arguments.recipe is None else algorithms,
            embedded=int(arguments.embedded * 2**20),
        )
    except (ValueError, OSError) as refused:
        raise SystemExit(visible(str(refused))) from refused
    figures = f"{len(run.metrics)} metrics, {len(run.rollouts)} rollouts, {len(run.findings)} findings"
    say("\n".join([f"{path}: {figures}", *(f"could not be read: {note}" for note in run.notes)]))
    return 1 if run.notes else 0
