"""resume-check: runs a recipe once, then again from a checkpoint of each step, and compares the runs."""

import argparse
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rl import distributed
from lightning_rl.cli.output import say
from lightning_rl.cli.recipes import check_launch, load_recipe, write_elsewhere
from lightning_rl.corrections import RLCallback
from lightning_rl.metrics import is_of_the_clock
from lightning_rl.module import RLLightningModule
from lightning_rl.policy.tensor_hash import fingerprint
from lightning_rl.rollout import Rollout
from lightning_rl.utils.trainer import callbacks_of

KINDS = ("prompts", "rollout", "metrics", "weights", "optimizer")  # in order of computation


class StepPrint(NamedTuple):
    """Hashes after an optimizer step, one for each of :data:`KINDS`, and the metrics."""

    hashes: dict[str, str]
    metrics: dict[str, float]


class CheckpointDifference(NamedTuple):
    """First step, counted from 0, in which a kind differs; sorts in order of computation."""

    step: int
    place: int
    text: str


def run(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    if arguments.first >= arguments.steps:
        raise SystemExit(f"expected --first below --steps={arguments.steps}, got {arguments.first}")
    return resume_check(arguments.recipe, options, steps=arguments.steps, first=arguments.first)


class StepPrints(RLCallback):
    """Callback that hashes each step of this rank by step index, and saves a checkpoint after each step.

    Args:
        folder: Folder for checkpoints; that of rank 0 is used. None to save none.
    """

    name = "step_prints"

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.steps: dict[int, StepPrint] = {}
        self._rollout = {"prompts": "", "rollout": ""}

    @override
    def observe(self, rollout: Rollout) -> None:
        prompts = [("prompt_ids", rollout.prompt_ids), ("sample_ids", rollout.sample_ids)]
        self._rollout = {"prompts": fingerprint(prompts), "rollout": fingerprint(rollout.tensors())}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        current = cast(RLLightningModule, pl_module).run.progress.current
        if current is not None:
            self.observe(current.rollout)
        self.folder = None if self.folder is None else _of_first_rank(self.folder)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module = cast(RLLightningModule, pl_module)
        metrics = {name: value for name, value in module.run.metrics.values().items() if not is_of_the_clock(name)}
        hashes = {
            "metrics": fingerprint((name, torch.tensor(value, dtype=torch.float64)) for name, value in metrics.items()),
            "weights": fingerprint(module.parallel.full_parameters(module.required_policy)),
            "optimizer": fingerprint(_states(trainer.optimizers)),
        }
        self.steps[batch.index] = StepPrint({**self._rollout, **hashes}, metrics)
        if self.folder is not None:
            trainer.save_checkpoint(self.folder / f"{batch.index + 1}.ckpt")


def resume_check(recipe: Path, options: Sequence[str], *, steps: int, first: int = 1) -> int:
    """Compare an uninterrupted run with runs that resume after each of its steps, from ``first`` on; print a table.

    Under torchrun, every rank compares its part and rank 0 prints.

    Returns:
        Exit code: 0 if everything was bitwise equal, 1 otherwise.
    """
    with tempfile.TemporaryDirectory() as temporary:
        files = Path(temporary) / "files"
        whole = _run(recipe, options, steps, files, save_to=Path(temporary))
        folder = _of_first_rank(Path(temporary))
        say(f"{len(whole)} optimizer steps, then interrupted after each and resumed\n")
        say("after step  " + "".join(f"{kind:<12}" for kind in KINDS))
        equal = True
        for step in range(first, len(whole)):
            resumed = _run(recipe, options, steps, files, resume_from=folder / f"{step}.ckpt")
            ranks: Any = distributed.process_objects([tuple(each) for each in _differences(whole, resumed, step)])
            differences = [CheckpointDifference(*difference) for rank in ranks for difference in rank]
            equal = equal and not differences
            firsts = {difference.place: difference.step for difference in sorted(differences, reverse=True)}
            marks = [f"step {firsts[place] + 1}" if place in firsts else "equal" for place in range(len(KINDS))]
            say(f"{step:<12}" + "".join(f"{mark:<12}" for mark in marks))
            if differences:
                say(f"            first difference: {min(differences).text}")
        if distributed.process_count() > 1:
            dist.barrier()
    say("\nbitwise equal" if equal else "\nNOT EQUAL")
    return 0 if equal else 1


def _run(
    recipe: Path,
    options: Sequence[str],
    steps: int,
    files: Path,
    *,
    save_to: Path | None = None,
    resume_from: Path | None = None,
) -> dict[int, StepPrint]:
    loaded, prints = load_recipe(recipe, options), StepPrints(save_to)
    trainer = loaded.trainer
    check_launch(trainer)
    write_elsewhere(trainer, files)
    callbacks_of(trainer).append(prints)
    trainer.fit_loop.epoch_loop.max_steps = steps
    trainer.fit_loop.max_epochs = -1
    trainer.fit(loaded.module, loaded.data, ckpt_path=resume_from)
    return prints.steps


def _differences(whole: dict[int, StepPrint], resumed: dict[int, StepPrint], step: int) -> list[CheckpointDifference]:
    """Return the first difference of each kind from a step on."""
    differences: dict[str, CheckpointDifference] = {}
    for index in range(step, len(whole)):
        if index not in resumed:
            missing = CheckpointDifference(index, 0, f"step {index + 1} is missing in the resumed run")
            return [*differences.values(), missing]
        one, other = whole[index], resumed[index]
        for place, kind in enumerate(KINDS):
            if one.hashes[kind] != other.hashes[kind]:
                detail = _metric_difference(one.metrics, other.metrics) if kind == "metrics" else ""
                differences.setdefault(kind, CheckpointDifference(index, place, f"{kind} of step {index + 1}{detail}"))
    return list(differences.values())


def _metric_difference(whole: dict[str, float], resumed: dict[str, float]) -> str:
    for name, value in whole.items():
        other = resumed.get(name)
        if other != value and not (other is not None and other != other and value != value):
            return f": {name} is {value!r}, resumed {other!r}"
    return f": other names, {sorted(whole.keys() ^ resumed.keys())}"


def _states(optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """Yield states in the order of the parameters; the dictionaries have another order after loading."""
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    yield f"{number}/{key}", value


def _of_first_rank(folder: Path) -> Path:
    """Return rank 0's folder on every rank; needs the process group."""
    return Path(str(distributed.process_objects(str(folder))[0]))
