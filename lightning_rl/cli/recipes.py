"""Recipes as scripts: run one up to where it would train, and take what it gave to the Trainer."""

import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelSummary, ProgressBar
from lightning.pytorch.strategies import ParallelStrategy

from lightning_rl.data import PromptDataModule
from lightning_rl.metrics import callbacks_of
from lightning_rl.module import RLLightningModule


class Ended(Exception):  # noqa: N818
    """Ends a recipe where a command has seen enough of it."""


@dataclass(frozen=True, slots=True)
class Reached:
    """What a recipe passes to its Trainer."""

    trainer: Trainer
    module: RLLightningModule
    data: PromptDataModule


def reached(recipe: Path, options: Sequence[str]) -> Reached:
    """Runs a recipe up to its first ``Trainer.fit`` or ``Trainer.validate``, which is not executed.

    Raises:
        SystemExit: if it ends without, or passes something else than an RLLightningModule and a PromptDataModule.
    """
    seen: list[Reached] = []

    def stop(trainer: Trainer, _: Callable[..., None], model: Any = None, *given: Any, **named: Any) -> None:
        data = next((one for one in (*given, *named.values()) if isinstance(one, PromptDataModule)), None)
        model = named.get("model", model)
        if not isinstance(model, RLLightningModule) or data is None:
            kinds = (
                type(model).__name__,
                ", ".join(type(one).__name__ for one in (*given, *named.values())) or "nothing",
            )
            raise SystemExit(f"expected an RLLightningModule and a PromptDataModule, got {kinds[0]} and {kinds[1]}")
        seen.append(Reached(trainer, model, data))
        raise Ended

    with intercepted(fit=stop, validate=stop):
        run_script(recipe, options)
    return seen[0]


def run_script(recipe: Path, options: Sequence[str]) -> None:
    """Runs a recipe as ``python recipe options`` would, until :class:`Ended` is raised in it.

    Raises:
        SystemExit: if it ends by itself.
    """
    with patch.object(sys, "argv", [str(recipe), *options]):
        sys.path.insert(0, str(recipe.parent.resolve()))
        try:
            runpy.run_path(str(recipe), run_name="__main__")
        except Ended:
            return
        finally:
            sys.path.pop(0)
    raise SystemExit(f"expected {recipe} to call Trainer.fit, but it ended without")


def check_started(trainer: Trainer) -> None:
    """Ends a command that a Trainer of several ranks would start again for each of them.

    Raises:
        SystemExit: saying how to start it.
    """
    if starts_itself(trainer):
        raise SystemExit(
            f"expected one process for each of {trainer.world_size} ranks, got a Trainer that would start them itself: "
            f"torchrun --nproc_per_node {trainer.num_devices} -m lightning_rl.cli ..."
        )


def starts_itself(trainer: Trainer) -> bool:
    """Whether a Trainer of several ranks would start the others, by running this process's command again."""
    strategy = trainer.strategy
    if not isinstance(strategy, ParallelStrategy) or trainer.world_size == 1:
        return False
    return strategy.cluster_environment is None or not strategy.cluster_environment.creates_processes_externally


def until_training(given: Reached, callback: Callback, ckpt_path: Path | None = None) -> None:
    """Begins the recipe's fit with one callback more, which raises :class:`Ended`; nothing is shown or written.

    Raises:
        SystemExit: if the Trainer would start the processes of several ranks itself.
    """
    check_started(given.trainer)
    trainer = given.trainer
    shown = ModelSummary, ProgressBar
    vars(trainer)["callbacks"] = [*(one for one in callbacks_of(trainer) if not isinstance(one, shown)), callback]
    trainer.loggers, trainer.num_sanity_val_steps = [], 0
    with suppress(Ended):
        trainer.fit(given.module, given.data, ckpt_path=ckpt_path)


@contextmanager
def intercepted(**methods: Callable[..., None]) -> Iterator[None]:
    """Calls ``function(trainer, original, *arguments)`` in the place of methods of every Trainer."""
    with ExitStack() as stack:
        for name, function in methods.items():
            original = cast(Callable[..., None], getattr(Trainer, name))
            stack.enter_context(patch.object(Trainer, name, _instead(function, original)))
        yield


def _instead(function: Callable[..., None], original: Callable[..., None]) -> Callable[..., None]:
    return lambda self, *given, **named: function(self, original, *given, **named)
