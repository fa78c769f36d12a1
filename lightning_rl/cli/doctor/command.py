"""Run of a recipe up to its first training step, with all checks, and output of their findings."""

import argparse
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import cast

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_rl.cli.doctor.findings import error, fact, paragraph, warning
from lightning_rl.cli.doctor.memory_checks import memory
from lightning_rl.cli.doctor.recipe_checks import QUICK, bridges, eos, kernels, prompts, tokenizer
from lightning_rl.cli.doctor.sample_checks import draw_samples, engine_logprobs, first_texts, rewards, truncation
from lightning_rl.cli.output import say
from lightning_rl.cli.recipes import Recipe, load_recipe, run_until_fit, starts_itself
from lightning_rl.module import RLLightningModule
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.inspection import StopRecipe

Add = Callable[[Iterable[Finding]], None]


def run(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    return doctor(arguments.recipe, options, arguments.prompts, arguments.limit, quick=arguments.quick)


def doctor(recipe: Path, options: Sequence[str], prompts: int = 8, limit: float = 60.0, *, quick: bool = False) -> int:
    """Print facts and findings about a recipe without training.

    Facts are printed at once, because building the policy may take minutes.

    Args:
        recipe: Script that calls ``Trainer.fit``.
        options: Command line of the script.
        prompts: Number of prompts to sample completions for.
        limit: Timeout in seconds of a reward function for all samples.
        quick: True to skip checks that need a policy.

    Returns:
        Exit code: 1 if there is an error, 0 otherwise.
    """
    findings: list[Finding] = []
    for finding in examine(load_recipe(recipe, options), prompts=prompts, limit=limit, quick=quick, tell=_say_fact):
        findings += [finding] if finding.severity != "fact" else []
    for finding in findings:
        say(paragraph(finding))
    count = {kind: sum(finding.severity == kind for finding in findings) for kind in ("error", "warning")}
    say(f"\nerrors={count['error']} warnings={count['warning']}")
    return 1 if count["error"] else 0


def examine(
    recipe: Recipe, *, prompts: int, limit: float, quick: bool = False, tell: Callable[[Finding], None] | None = None
) -> list[Finding]:
    """Run all checks and return the findings; checks that need a policy run only if the others found no error.

    Args:
        recipe: Recipe to check.
        prompts: Number of prompts to sample completions for.
        limit: Timeout in seconds of a reward function for all samples.
        quick: True to skip checks that need a policy.
        tell: Callback for each finding.
    """
    findings: list[Finding] = []

    def add(more: Iterable[Finding]) -> None:
        for finding in more:
            findings.append(finding)
            if tell is not None:
                tell(finding)

    for check in QUICK:
        add(check(recipe))
    if any(finding.severity == "error" for finding in findings):
        add([warning("setup", "skipped, because of the errors above", "fix these first")])
    elif quick:
        add([fact("setup", "skipped, with policy, samples and rewards, because of --quick")])
    elif starts_itself(recipe.trainer):
        cure = f"torchrun --nproc_per_node {recipe.trainer.num_devices} -m lightning_rl doctor ..."
        observed = f"skipped, because this Trainer would start {recipe.trainer.world_size} ranks"
        add([warning("setup", observed, cure)])
    else:
        texts = _examine_fit(recipe, add, prompts, limit)
        reported = [finding.observed for finding in findings]
        new = [text for text in texts if not any(observed in text for observed in reported)]
        add(warning("setup", text, "follow the message or ignore it") for text in new)
    return findings


def _examine_fit(recipe: Recipe, add: Add, prompts: int, limit: float) -> list[str]:
    """Start the fit, add errors that prevent it, and return the distinct warnings of the library."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run_until_fit(recipe, _Examination(add, prompts, limit))
        except Exception as refused:  # noqa: BLE001  an error that prevents a fit is a finding
            add([error("setup", f"{type(refused).__name__}: {refused}", "follow the message; no step was made")])
    texts = [str(each.message) for each in caught if "lightning_rl" in Path(each.filename).parts]
    return list(dict.fromkeys(texts))


def _say_fact(finding: Finding) -> None:
    if finding.severity == "fact":
        say(paragraph(finding))


class _Examination(Callback):
    """Callback that runs the checks that need a policy when a fit is about to start, and ends the fit."""

    def __init__(self, add: Add, prompts: int, limit: float) -> None:
        self.add, self.prompts, self.limit = add, prompts, limit
        self._begin = time.perf_counter()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        policy = cast(RLLightningModule, pl_module).required_policy.model
        seconds, size = time.perf_counter() - self._begin, sum(weight.numel() for weight in policy.parameters())
        self.add([fact("policy", f"{type(policy).__name__} of {size:,} parameters, ready after {seconds:.1f} s")])

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = cast(RLLightningModule, pl_module)
        for check in (tokenizer, eos, prompts, bridges, kernels):
            self.add(check(module))
        if not module.options.environment:
            self.add(memory(module))
        samples = draw_samples(module, min(self.prompts, module.data_module.pass_length or self.prompts), self.limit)
        if module.options.environment:  # their replies have unknown lengths
            self.add(memory(module, samples.rollout))
        for check in (first_texts, truncation, rewards, engine_logprobs):
            self.add(check(samples))
        raise StopRecipe(module)
