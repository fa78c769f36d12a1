"""The command: runs a recipe up to its first training step, asks every check, and prints what they say."""

import argparse
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_rl.cli.doctor.batches import batches
from lightning_rl.cli.doctor.findings import error, paragraph, warning
from lightning_rl.cli.doctor.memory import memory
from lightning_rl.cli.doctor.samples import Samples, draw_samples, engine_logprobs, rewards, truncation
from lightning_rl.cli.doctor.templates import eos, template_prefix
from lightning_rl.cli.doctor.versions import versions
from lightning_rl.cli.output import say
from lightning_rl.cli.recipes import Recipe, load_recipe, run_until_fit, starts_itself
from lightning_rl.finding import Finding
from lightning_rl.inspection import StopRecipe
from lightning_rl.module import RLLightningModule

OF_RECIPES: tuple[Callable[[Recipe], Iterator[Finding]], ...] = (versions, batches, template_prefix)
OF_MODULES: tuple[Callable[[RLLightningModule], Iterator[Finding]], ...] = (eos, memory)
OF_SAMPLES: tuple[Callable[[Samples], Iterator[Finding]], ...] = (truncation, rewards, engine_logprobs)


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``lightning-rl doctor`` to the command line."""
    parser = commands.add_parser("doctor", help="look for what would go wrong in a recipe, without training")
    parser.add_argument("recipe", type=Path, help="a script that calls Trainer.fit")
    parser.add_argument("--prompts", type=int, default=8, help="prompts to sample answers to")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a reward may take for all of them")
    parser.epilog = "What stands after -- is passed on to the recipe."
    parser.set_defaults(run=lambda asked, options: doctor(asked.recipe, options, asked.prompts, asked.limit))


def doctor(recipe: Path, options: Sequence[str], prompts: int = 8, limit: float = 60.0) -> int:
    """Prints facts and findings about a recipe; trains nothing.

    Args:
        recipe: a script that calls ``Trainer.fit``; nothing in it has to know of this.
        options: its command line.
        prompts: how many prompts to sample answers to.
        limit: seconds that a reward function may take for all samples.

    Returns:
        The exit code: 1 if there is an error, 0 otherwise.
    """
    findings = examine(load_recipe(recipe, options), prompts=prompts, limit=limit)
    for finding in sorted(findings, key=lambda finding: finding.severity != "fact"):
        say(paragraph(finding))
    count = {kind: sum(finding.severity == kind for finding in findings) for kind in ("error", "warning")}
    say(f"\nerrors={count['error']} warnings={count['warning']}")
    return 1 if count["error"] else 0


def examine(recipe: Recipe, *, prompts: int, limit: float) -> list[Finding]:
    """Asks every check; those that need a policy only if the others found no error."""
    findings = [finding for check in OF_RECIPES for finding in check(recipe)]
    if any(finding.severity == "error" for finding in findings):
        return [*findings, warning("setup", "not tried, because of the errors above", "fix these first")]
    trainer = recipe.trainer
    if starts_itself(trainer):
        cure = f"torchrun --nproc_per_node {trainer.num_devices} -m lightning_rl.cli doctor ..."
        observed = f"not tried, because this Trainer would start {trainer.world_size} ranks"
        return [*findings, warning("setup", observed, cure)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run_until_fit(recipe, _Examination(findings, prompts, limit))
        except Exception as refused:  # noqa: BLE001  whatever keeps a fit from beginning is a finding
            text = f"{type(refused).__name__}: {refused}"
            findings.append(error("setup", text, "what the message says; no step was made"))
    texts = [str(each.message) for each in caught if "lightning_rl" in Path(each.filename).parts]
    return findings + [warning("setup", text, "as it says, or leave it") for text in dict.fromkeys(texts)]


class _Examination(Callback):
    """Asks the checks that need a policy when a fit is about to begin, and ends it."""

    def __init__(self, findings: list[Finding], prompts: int, limit: float) -> None:
        self.findings, self.prompts, self.limit = findings, prompts, limit

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = cast(RLLightningModule, pl_module)
        self.findings += [finding for check in OF_MODULES for finding in check(module)]
        samples = draw_samples(module, min(self.prompts, module.prompt_stream.pass_length or self.prompts), self.limit)
        self.findings += [finding for check in OF_SAMPLES for finding in check(samples)]
        raise StopRecipe(module)
