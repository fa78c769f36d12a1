"""Checks of a recipe and of its module: package versions, sizes that divide each other, tokenizer, chat template."""

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from packaging.requirements import Requirement
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from lightning_rl.cli.doctor.findings import error, fact, warning
from lightning_rl.cli.recipes import Recipe
from lightning_rl.corrections import RLCallback
from lightning_rl.data.prompt_checks import is_chat, prompt_findings
from lightning_rl.data.row_schema import CONTINUES, TOOLS
from lightning_rl.distributed import FSDP2Strategy
from lightning_rl.environments.chat_template import KINDS, Bridge, BridgeError
from lightning_rl.module import RLLightningModule
from lightning_rl.policy.text_model import modules_behind
from lightning_rl.run.prompts import wrong_eos
from lightning_rl.run_checks import size_cure
from lightning_rl.testing.properties.fixed_batch import judge_fixed_batch, skipped_checks
from lightning_rl.utils.decoding import hidden_tokens
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.template_date import TODAY, writes_date
from lightning_rl.utils.trainer import callbacks_of

EXAMPLES = 256  # prompts
PRINTED = ("torch", "lightning", "transformers")
PROBES = ("12345 + 6.78 = ?", "Don't  stop,\nplease.\n\n", "naïve 数学 😀", "  return x[0]\t# done")


def kernels(module: RLLightningModule) -> Iterator[Finding]:
    """Report the options that fuse elementwise operations of layers on a GPU, if the run uses none of them."""
    options, policy = module.models.options, module.required_policy
    if module.device.type != "cuda" or options.compile or options.liger or options.bitwise:
        return
    compiles = module.parallel.compiles and not any(modules_behind(model, "router_logits") for model in policy.models())
    yield fact(
        "kernels",
        f"ModelOptions(liger=True{' or compile=True' if compiles else ''}) fuses norms, rotary embeddings and gates; "
        "with Liger, an update of 1.5B parameters took 0.82 of the time on an H100",
    )


def versions(recipe: Recipe) -> Iterator[Finding]:
    """Check that required and installed optional packages are within the supported versions."""
    del recipe
    yield fact("versions", ", ".join(f"{name} {version(name)}" for name in PRINTED))
    for requirement in map(Requirement, requires("lightning-rl") or ()):
        optional = requirement.marker is not None and "extra" in str(requirement.marker)
        window = f"{requirement.name}{requirement.specifier}"
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            if not optional:
                yield error("versions", f"expected {window}, got none installed", f"pip install '{window}'")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            observed = f"expected {requirement.name} {requirement.specifier}, got {installed}"
            yield error("versions", observed, f"pip install '{window}'")


def batches(recipe: Recipe) -> Iterator[Finding]:
    """Check that rollouts split into whole groups per minibatch and rank, and that training ends after one."""
    module, data, ranks = recipe.module, recipe.data, recipe.trainer.world_size
    if isinstance(recipe.trainer.strategy, FSDP2Strategy):  # tensor parallel ranks hold the same rows
        ranks //= int(recipe.trainer.strategy._tensor_parallel_size)  # noqa: SLF001
    prompts, steps, minibatches = (
        data.prompts_per_rollout,
        module.steps_per_rollout,
        module.options.minibatches_per_rollout,
    )
    shape = f"{prompts} prompts x {module.options.group_size} samples"
    yield fact("batches", f"{shape} per rollout, for {steps} optimizer steps; {ranks} ranks")
    if prompts % (minibatches * ranks):
        divisor = f"minibatches_per_rollout x ranks = {minibatches} x {ranks}"
        cure = size_cure(prompts, minibatches * ranks)
        yield error("batches", f"{prompts} prompts are not divisible by {divisor}", cure)
    whole, rest = divmod(data.pass_length or 0, prompts)  # 0 for a stream
    if rest:
        observed = f"{rest} of {data.pass_length} prompts are left over after the {whole} rollouts of a pass"
        cure = "add or drop prompts for whole passes, or ignore it: the next pass starts with the leftover prompts"
        yield warning("batches", observed, cure)
    max_steps, max_batches = recipe.trainer.fit_loop.epoch_loop.max_steps, recipe.trainer.limit_train_batches
    for name, limit in (("max_steps", max_steps), ("limit_train_batches", max_batches)):
        if isinstance(limit, int) and limit > 0 and limit % steps:  # wastes samples
            observed = f"{name}={limit} ends within a rollout of {steps} optimizer steps"
            yield warning("batches", observed, f"{name}={limit // steps * steps or steps}")


def algorithm(recipe: Recipe) -> Iterator[Finding]:
    """Check the properties of loss, estimator and corrections on a fixed batch."""
    corrections = [callback for callback in callbacks_of(recipe.trainer) if isinstance(callback, RLCallback)]
    verdict = judge_fixed_batch(recipe.module.algorithm, corrections)
    for line in skipped_checks(verdict):
        yield fact("algorithm", line)
    for broken in verdict.findings:
        observed = f"{broken.check}: {broken.culprit}: expected {broken.expected}, observed {broken.observed}"
        yield error("algorithm", observed, broken.cure)


QUICK = (versions, batches, algorithm)
"""Checks of a recipe that need no policy."""


def tokenizer(module: RLLightningModule) -> Iterator[Finding]:
    """Check that the loaded tokenizer returns the same ids as its ``tokenizer.json``.

    transformers 5 chooses the tokenizer class by the model type in ``config.json``, and a class has its own
    pre-tokenizer: a tokenizer in a Qwen2 folder is loaded with that of Qwen2.
    """
    loaded = module.options.tokenizer
    try:
        file = None if loaded is None else cached_file(loaded.name_or_path, "tokenizer.json", local_files_only=True)
    except OSError:
        return
    if loaded is None or file is None:
        return
    written = Tokenizer.from_file(file)
    for text in PROBES:
        ids, expected = (
            loaded.encode(text, add_special_tokens=False),
            written.encode(text, add_special_tokens=False).ids,
        )
        if ids != expected:
            observed = f"{type(loaded).__name__} encodes {text!r} as {ids}, tokenizer.json as {expected}"
            cure = (
                "tokenizer=PreTrainedTokenizerFast.from_pretrained(folder), unless the model was trained on the former"
            )
            yield warning("tokenizer", observed, cure)
            return


def eos(module: RLLightningModule) -> Iterator[Finding]:
    """Check that the ids that end responses include the token that the chat template writes after an answer."""
    ids, tokenizer = list(module.run.sampling.eos_token_ids or ()), module.options.tokenizer
    names = ", ".join(_token_name(tokenizer, token) for token in ids)
    yield fact("eos", f"responses end with {names or 'a stop string only'}")
    hidden = [] if tokenizer is None else sorted(hidden_tokens(tokenizer, ids))
    yield fact(
        "eos", f"the texts for rewards leave out {', '.join(_token_name(tokenizer, i) for i in hidden) or 'no token'}"
    )
    data = module.data_module
    if fault := wrong_eos(module.run.sampling, tokenizer, data.first(), data.template_options):
        yield fault


def prompts(module: RLLightningModule) -> Iterator[Finding]:
    """Check what the policy reads: stray control tokens, and columns that nothing reads."""
    ends = module.run.sampling.eos_token_ids or ()
    yield from prompt_findings(module.data_module.prompts.examples(EXAMPLES), module.options.tokenizer, ends)
    uses_template = module.run.environments is not None or is_chat(module.data_module.first())
    if uses_template and writes_date(module.options.tokenizer):
        yield fact("prompt", f"the chat template writes the date of {TODAY.text('%Y-%m-%d')}, which checkpoints keep")


def bridges(module: RLLightningModule) -> Iterator[Finding]:
    """Report the messages that the chat template allows after an answer without changing earlier tokens.

    Most templates render an earlier answer differently once a message follows, for example without its reasoning. Only
    the text between two answers matters, because earlier turns are never rendered again.
    """
    tokenizer = module.options.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        return
    rows = module.data_module.prompts.examples(EXAMPLES)
    variables = [{key: row.variables[key] for key in row.variables if key not in (TOOLS, CONTINUES)} for row in rows]
    for number, own in enumerate(variables or [{}]):
        if own not in variables[:number]:
            yield from _bridge(module, tokenizer, own)


def _bridge(module: RLLightningModule, tokenizer: PreTrainedTokenizerBase, own: Mapping[str, Any]) -> Iterator[Finding]:
    rows = f" of rows with chat_template_kwargs={dict(own)}" if own else ""
    options = {**module.data_module.template_options, **own}
    try:
        bridge = Bridge(tokenizer, module.run.sampling.eos_token_ids or (), options)
    except BridgeError as error:
        yield fact("template", f"no message can follow an answer{rows}: {error}")
        return
    wrong = {kind: bridge.check(kind) for kind in KINDS}
    right = [kind for kind, reasons in wrong.items() if not reasons]
    yield fact("template", f"messages that can follow an answer{rows}: {', '.join(right) or 'none'}")
    for kind, reasons in wrong.items():
        if reasons:
            yield fact("template", f"{kind} messages cannot follow an answer{rows}: {'; '.join(reasons)}")


def _token_name(tokenizer: PreTrainedTokenizerBase | None, token: int) -> str:
    return str(token) if tokenizer is None else f"{token} ({tokenizer.convert_ids_to_tokens(token)})"
