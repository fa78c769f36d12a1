"""resume-check: runs a recipe once, then again from a checkpoint of every step, and compares everything."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_rl import distributed
from lightning_rl.cli.fingerprints import KINDS, Fingerprint, Fingerprints
from lightning_rl.cli.output import say
from lightning_rl.cli.recipes import check_launch, load_recipe
from lightning_rl.metrics import callbacks_of

Taken = dict[int, Fingerprint]


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``lightning-rl resume-check`` to the command line."""
    checking = commands.add_parser(
        "resume-check", help="interrupt a recipe after every optimizer step, resume it, and compare"
    )
    checking.add_argument("recipe", type=Path, help="a script that calls Trainer.fit")
    checking.add_argument("--steps", type=int, default=8, help="optimizer steps of the whole run")
    checking.add_argument("--first", type=int, default=1, help="first step to interrupt after")
    checking.epilog = "What stands after -- is passed on to the recipe."
    checking.set_defaults(
        run=lambda given, options: resume_check(given.recipe, options, steps=given.steps, first=given.first)
    )


class _SaveEach(Callback):
    """A checkpoint after every optimizer step, in the folder of rank 0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.folder = _from_first(self.folder)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.save_checkpoint(self.folder / f"{batch.index + 1}.ckpt")


def resume_check(recipe: Path, options: Sequence[str], *, steps: int, first: int = 1) -> int:
    """Compares an uninterrupted run with one that is resumed after each of its steps; prints a table.

    Under torchrun every rank takes part, compares its own and reports to rank 0.

    Args:
        recipe: a script that calls ``Trainer.fit`` once; nothing in it has to know of this.
        options: its command line.
        steps: optimizer steps of the run.
        first: the first step to interrupt after.

    Returns:
        The exit code: 0 if everything was bitwise equal, 1 otherwise.
    """
    with tempfile.TemporaryDirectory() as own:
        whole = _run(recipe, options, steps, save_to=Path(own))
        folder = _from_first(Path(own))
        say(f"{len(whole)} optimizer steps, then interrupted after each and resumed\n")
        say("after step  " + "".join(f"{kind:<12}" for kind in KINDS))
        equal = True
        for step in range(first, len(whole)):
            resumed = _run(recipe, options, steps, resume_from=folder / f"{step}.ckpt")
            differences = _of_all_ranks(_difference(whole, resumed, step))
            equal = equal and not differences
            marks = [min((d[1] for d in differences if d[0] == kind), default=None) for kind in KINDS]
            say(f"{step:<12}" + "".join(f"{'equal' if at is None else f'step {at + 1}':<12}" for at in marks))
            if differences:
                say("            first difference: " + min(differences, key=lambda d: (d[1], KINDS.index(d[0])))[2])
        if distributed.process_count() > 1:
            dist.barrier()
    say("\nbitwise equal" if equal else "\nNOT EQUAL")
    return 0 if equal else 1


def _run(
    recipe: Path, options: Sequence[str], steps: int, *, save_to: Path | None = None, resume_from: Path | None = None
) -> Taken:
    loaded, fingerprints = load_recipe(recipe, options), Fingerprints()
    trainer = loaded.trainer
    check_launch(trainer)
    callbacks_of(trainer).extend([fingerprints] if save_to is None else [fingerprints, _SaveEach(save_to)])
    trainer.fit_loop.epoch_loop.max_steps = steps
    trainer.fit_loop.max_epochs = -1
    trainer.fit(loaded.module, loaded.data, ckpt_path=resume_from)
    return fingerprints.taken


def _difference(whole: Taken, resumed: Taken, step: int) -> list[tuple[str, int, str]]:
    found = []
    for index in range(step, len(whole)):
        if index not in resumed:
            return [*found, ("prompts", index, f"step {index + 1} is missing in the resumed run")]
        ours, theirs = whole[index], resumed[index]
        for kind in KINDS:
            if ours.hashes[kind] != theirs.hashes[kind] and kind not in {known[0] for known in found}:
                found.append((kind, index, f"{kind} of step {index + 1}{_detail(kind, ours, theirs)}"))
    return found


def _detail(kind: str, ours: Fingerprint, theirs: Fingerprint) -> str:
    if kind != "metrics":
        return ""
    for name, value in ours.metrics.items():
        other = theirs.metrics.get(name)
        if other != value and not (other is not None and other != other and value != value):
            return f": {name} is {value!r}, resumed {other!r}"
    return f": other names, {sorted(ours.metrics.keys() ^ theirs.metrics.keys())}"


def _of_all_ranks(differences: list[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    everyone = distributed.process_objects(differences)
    return [tuple(found) for own in everyone for found in own]  # pyright: ignore[reportGeneralTypeIssues, reportReturnType]


def _from_first(folder: Path) -> Path:
    """Rank 0's folder on every rank, once the process group exists."""
    return Path(str(distributed.process_objects(str(folder))[0]))
