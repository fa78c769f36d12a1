"""Run of a recipe script up to its fit, and access to the objects that it passes to the Trainer."""

import runpy
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary, ProgressBar
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import ParallelStrategy

from lightning_rl.cli.scripts import sentence_of
from lightning_rl.data import PromptDataModule
from lightning_rl.module import RLLightningModule
from lightning_rl.utils.inspection import StopRecipe, inspection
from lightning_rl.utils.trainer import callbacks_of


@dataclass(frozen=True, slots=True)
class Recipe:
    """Trainer, module and data of a recipe."""

    trainer: Trainer
    module: RLLightningModule
    data: PromptDataModule


def load_recipe(script: Path, options: Sequence[str]) -> Recipe:
    """Run a recipe like ``python script options``, up to its first ``Trainer.fit`` or ``Trainer.validate``.

    Its folder stays on the path, for later imports.

    Raises:
        SystemExit: If it ends before, raises, or passes other objects than an RLLightningModule and a PromptDataModule.
    """
    folder, arguments = str(script.parent.resolve()), sys.argv
    sys.path[:0] = [folder] if folder not in sys.path else []
    sys.argv = [str(script), *options]
    try:
        with inspection():
            runpy.run_path(str(script), run_name="__main__")
    except StopRecipe as stop:
        module, trainer = cast(RLLightningModule, stop.module), stop.module.trainer
        vars(trainer)["callbacks"] = stop.callbacks
    except Exception as error:  # any error of the user's script
        raise SystemExit(sentence_of(error, script)) from error
    else:
        raise SystemExit(f"expected {script} to call Trainer.fit, but it ended without, or with no RLLightningModule")
    finally:
        sys.argv = arguments
    try:
        return Recipe(trainer, module, module.data_module)
    except TypeError as refused:
        raise SystemExit(str(refused)) from refused


def check_launch(trainer: Trainer) -> None:
    """Check that a Trainer of several ranks does not start processes itself.

    Raises:
        SystemExit: With the command to use.
    """
    if starts_itself(trainer):
        raise SystemExit(
            f"expected one process for each of {trainer.world_size} ranks, got a Trainer that would start them itself: "
            f"torchrun --nproc_per_node {trainer.num_devices} -m lightning_rl ..."
        )


def starts_itself(trainer: Trainer) -> bool:
    """Return True if a Trainer of several ranks would start the others by running this command again."""
    strategy = trainer.strategy
    if not isinstance(strategy, ParallelStrategy) or trainer.world_size == 1:
        return False
    return strategy.cluster_environment is None or not strategy.cluster_environment.creates_processes_externally


def write_elsewhere(trainer: Trainer, folder: Path) -> None:
    """Let the files that a Trainer, its loggers and its ModelCheckpoints would write go to another folder."""
    trainer.loggers = [DummyLogger() for _ in trainer.loggers]
    vars(trainer)["_default_root_dir"] = str(folder)
    for number, callback in enumerate(trainer.checkpoint_callbacks):
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            callback.dirpath = str(folder / f"checkpoints_{number}")


def run_until_fit(recipe: Recipe, callback: Callback, ckpt_path: Path | None = None) -> None:
    """Start the recipe's fit with a callback that raises :class:`StopRecipe`; nothing is displayed or written.

    Raises:
        SystemExit: If the Trainer would start the processes of several ranks itself.
    """
    check_launch(recipe.trainer)
    trainer = recipe.trainer
    others = [each for each in callbacks_of(trainer) if not isinstance(each, ModelSummary | ProgressBar)]
    vars(trainer)["callbacks"] = [*others, callback]
    trainer.num_sanity_val_steps = 0
    with tempfile.TemporaryDirectory() as folder, suppress(StopRecipe):
        write_elsewhere(trainer, Path(folder))
        trainer.fit(recipe.module, recipe.data, ckpt_path=ckpt_path)
