"""The command: runs a recipe up to its first training step, asks every check, and prints what they say."""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_rl import distributed
from lightning_rl.cli.doctor.batches import batches
from lightning_rl.cli.doctor.finding import Finding, error, warning
from lightning_rl.cli.doctor.memory import memory
from lightning_rl.cli.doctor.samples import Samples, engine_logprobs, rewards, sampled, truncation
from lightning_rl.cli.doctor.templates import eos, template_prefix
from lightning_rl.cli.doctor.versions import versions
from lightning_rl.cli.recipes import Ended, Reached, reached, starts_itself, until_training
from lightning_rl.module import RLLightningModule

BEFORE: tuple[Callable[[Reached], Iterator[Finding]], ...] = (versions, batches, template_prefix)
BUILT: tuple[Callable[[RLLightningModule], Iterator[Finding]], ...] = (eos, memory)
DRAWN: tuple[Callable[[Samples], Iterator[Finding]], ...] = (truncation, rewards, engine_logprobs)


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``lightning-rl doctor`` to the command line."""
    looking = commands.add_parser("doctor", help="look for what would go wrong in a recipe, without training")
    looking.add_argument("recipe", type=Path, help="a script that calls Trainer.fit")
    looking.add_argument("--prompts", type=int, default=8, help="prompts to sample answers to")
    looking.add_argument("--limit", type=float, default=60.0, help="seconds that a reward may take for all of them")
    looking.epilog = "What stands after -- is passed on to the recipe."
    looking.set_defaults(
        run=lambda given, options: doctor(given.recipe, options, prompts=given.prompts, limit=given.limit)
    )


def doctor(recipe: Path, options: Sequence[str], *, prompts: int = 8, limit: float = 60.0) -> int:
    """Prints facts and findings about a recipe; trains nothing.

    Args:
        recipe: a script that calls ``Trainer.fit``; nothing in it has to know of this.
        options: its command line.
        prompts: how many prompts to sample answers to.
        limit: seconds that a reward function may take for all samples.

    Returns:
        The exit code: 1 if there is an error, 0 otherwise.
    """
    found = examined(reached(recipe, options), prompts=prompts, limit=limit)
    for one in sorted(found, key=lambda each: each.severity != "fact"):
        _say(str(one))
    count = {kind: sum(one.severity == kind for one in found) for kind in ("error", "warning")}
    _say(f"\nerrors={count['error']} warnings={count['warning']}")
    return 1 if count["error"] else 0


def examined(given: Reached, *, prompts: int, limit: float) -> list[Finding]:
    """Asks every check; those that need a policy only if the others found no error."""
    found = [finding for check in BEFORE for finding in check(given)]
    if any(one.severity == "error" for one in found):
        return [*found, warning("setup", "not tried, because of the errors above", "fix these first")]
    return found + _tried(given, prompts, limit)


class _Look(Callback):
    """Asks the checks that need a policy when a fit is about to begin, and ends it."""

    def __init__(self, prompts: int, limit: float) -> None:
        self.prompts, self.limit = prompts, limit
        self.found: list[Finding] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = cast(RLLightningModule, pl_module)
        self.found += [finding for check in BUILT for finding in check(module)]
        samples = sampled(module, min(self.prompts, len(module.prompt_stream.rows)), self.limit)
        self.found += [finding for check in DRAWN for finding in check(samples)]
        raise Ended


def _tried(given: Reached, prompts: int, limit: float) -> list[Finding]:
    """What comes up when the recipe's fit begins: its own refusal, or what the checks find."""
    if starts_itself(given.trainer):
        cure = f"torchrun --nproc_per_node {given.trainer.num_devices} -m lightning_rl.cli doctor ..."
        return [warning("setup", f"not tried, because this Trainer would start {given.trainer.world_size} ranks", cure)]
    look = _Look(prompts, limit)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        try:
            until_training(given, look)
        except Exception as refused:  # noqa: BLE001  whatever keeps a fit from beginning is a finding
            text = f"{type(refused).__name__}: {refused}"
            look.found.append(error("setup", text, "what the message says; no step was made"))
    own = [str(one.message) for one in raised if "lightning_rl" in Path(one.filename).parts]
    return look.found + [warning("setup", text, "as it says, or leave it") for text in dict.fromkeys(own)]


def _say(text: str) -> None:
    if distributed.process_count() == 1 or dist.get_rank() == 0:
        sys.stdout.write(f"{text}\n")
