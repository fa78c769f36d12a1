"""Run of a recipe up to its first training step, with all checks, and output of their findings."""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_rl.cli.doctor.batch_sizes import batches
from lightning_rl.cli.doctor.findings import error, fact, paragraph, warning
from lightning_rl.cli.doctor.memory_estimate import memory
from lightning_rl.cli.doctor.package_versions import versions
from lightning_rl.cli.doctor.sample_checks import Samples, draw_samples, engine_logprobs, rewards, truncation
from lightning_rl.cli.doctor.templates import bridges, eos
from lightning_rl.cli.doctor.tokenizers import tokenizer
from lightning_rl.cli.output import say
from lightning_rl.cli.recipes import Recipe, load_recipe, run_until_fit, starts_itself
from lightning_rl.module import RLLightningModule
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.inspection import StopRecipe

Subject = TypeVar("Subject")

OF_RECIPES: tuple[Callable[[Recipe], Iterator[Finding]], ...] = (versions, batches)
OF_MODULES: tuple[Callable[[RLLightningModule], Iterator[Finding]], ...] = (tokenizer, eos, bridges, memory)
OF_SAMPLES: tuple[Callable[[Samples], Iterator[Finding]], ...] = (truncation, rewards, engine_logprobs)


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
    findings = _Findings(tell)
    findings.take(OF_RECIPES, recipe)
    if any(finding.severity == "error" for finding in findings.all):
        findings.add(warning("setup", "skipped, because of the errors above", "fix these first"))
    elif quick:
        findings.add(fact("setup", "skipped, with policy, samples and rewards, because of --quick"))
    elif starts_itself(recipe.trainer):
        cure = f"torchrun --nproc_per_node {recipe.trainer.num_devices} -m lightning_rl doctor ..."
        observed = f"skipped, because this Trainer would start {recipe.trainer.world_size} ranks"
        findings.add(warning("setup", observed, cure))
    else:
        _examine_fit(recipe, findings, prompts, limit)
    return findings.all


def _examine_fit(recipe: Recipe, findings: "_Findings", prompts: int, limit: float) -> None:
    """Start the fit, and add errors that prevent it and warnings of the library."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run_until_fit(recipe, _Examination(findings, prompts, limit))
        except Exception as refused:  # noqa: BLE001  an error that prevents a fit is a finding
            text = f"{type(refused).__name__}: {refused}"
            findings.add(error("setup", text, "follow the message; no step was made"))
    texts = [str(each.message) for each in caught if "lightning_rl" in Path(each.filename).parts]
    for text in dict.fromkeys(texts):
        findings.add(warning("setup", text, "follow the message or ignore it"))


def _say_fact(finding: Finding) -> None:
    if finding.severity == "fact":
        say(paragraph(finding))


class _Findings:
    """List of findings, with a callback for each."""

    def __init__(self, tell: Callable[[Finding], None] | None) -> None:
        self.all: list[Finding] = []
        self._tell = tell

    def add(self, finding: Finding) -> None:
        self.all.append(finding)
        if self._tell is not None:
            self._tell(finding)

    def take(self, checks: Sequence[Callable[[Subject], Iterator[Finding]]], subject: Subject) -> None:
        """Run checks on a subject and add their findings."""
        for check in checks:
            for finding in check(subject):
                self.add(finding)


class _Examination(Callback):
    """Callback that runs the checks that need a policy when a fit is about to start, and ends the fit."""

    def __init__(self, findings: _Findings, prompts: int, limit: float) -> None:
        self.findings, self.prompts, self.limit = findings, prompts, limit
        self._begin = time.perf_counter()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        policy = cast(RLLightningModule, pl_module).required_policy.model
        seconds, size = time.perf_counter() - self._begin, sum(weight.numel() for weight in policy.parameters())
        self.findings.add(
            fact("policy", f"{type(policy).__name__} of {size:,} parameters, ready after {seconds:.1f} s")
        )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = cast(RLLightningModule, pl_module)
        self.findings.take(OF_MODULES, module)
        samples = draw_samples(module, min(self.prompts, module.prompt_stream.pass_length or self.prompts), self.limit)
        self.findings.take(OF_SAMPLES, samples)
        raise StopRecipe(module)
