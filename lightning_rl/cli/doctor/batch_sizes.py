"""Check that prompts, groups, minibatches, ranks and steps divide each other."""

from collections.abc import Iterator

from lightning_rl.cli.doctor.findings import error, fact, warning
from lightning_rl.cli.recipes import Recipe
from lightning_rl.distributed import FSDP2Strategy
from lightning_rl.run_spec import size_cure
from lightning_rl.utils.finding import Finding

NAME = "batches"


def batches(recipe: Recipe) -> Iterator[Finding]:
    """Check that rollouts split into whole groups per minibatch and rank, and that training ends after one."""
    module, data, ranks = recipe.module, recipe.data, recipe.trainer.world_size
    if isinstance(recipe.trainer.strategy, FSDP2Strategy):  # tensor parallel ranks hold the same rows
        ranks //= int(recipe.trainer.strategy._tensor_parallel_size)  # noqa: SLF001
    prompts, steps, parts = data.prompts_per_rollout, module.steps_per_rollout, module.minibatches_per_rollout * ranks
    shape = f"{prompts} prompts x {module.group_size} samples"
    yield fact(NAME, f"{shape} per rollout, for {steps} optimizer steps; {ranks} ranks")
    if prompts % parts:
        observed = (
            f"{prompts} prompts are not divisible by minibatches_per_rollout x ranks = "
            f"{module.minibatches_per_rollout} x {ranks}"
        )
        yield error(NAME, observed, size_cure(prompts, parts))
    length = data.pass_length or 0  # 0 for a stream
    rest = length % prompts
    if rest:
        whole = length // prompts
        observed = f"{rest} of {length} prompts are left over after the {whole} rollouts of a pass"
        cure = "add or drop prompts for whole passes, or ignore it: the next pass starts with the leftover prompts"
        yield warning(NAME, observed, cure)
    max_steps, max_batches = recipe.trainer.fit_loop.epoch_loop.max_steps, recipe.trainer.limit_train_batches
    for name, limit in (("max_steps", max_steps), ("limit_train_batches", max_batches)):
        if isinstance(limit, int) and limit > 0 and limit % steps:  # wastes samples
            observed = f"{name}={limit} ends within a rollout of {steps} optimizer steps"
            yield warning(NAME, observed, f"{name}={limit // steps * steps or steps}")
