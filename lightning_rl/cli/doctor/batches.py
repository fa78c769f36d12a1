"""Batches: do prompts, groups, minibatches, ranks and steps divide each other?"""

from collections.abc import Iterator

from lightning_rl.cli.doctor.findings import error, fact, warning
from lightning_rl.cli.recipes import Recipe
from lightning_rl.compatibility import size_cure
from lightning_rl.distributed import FSDP2Strategy
from lightning_rl.finding import Finding

NAME = "batches"


def batches(recipe: Recipe) -> Iterator[Finding]:
    """A rollout splits into whole groups for each minibatch and rank, and training ends with a whole rollout."""
    module, data, ranks = recipe.module, recipe.data, recipe.trainer.world_size
    if isinstance(recipe.trainer.strategy, FSDP2Strategy):  # ranks that split layers between them share their rows
        ranks //= int(recipe.trainer.strategy._tensor_parallel_size)  # noqa: SLF001
    prompts, steps, parts = data.prompts_per_rollout, module.steps_per_rollout, module.minibatches * ranks
    shape = f"{prompts} prompts x {module.group_size} samples"
    yield fact(NAME, f"{shape} for each rollout, which serves {steps} optimizer steps; {ranks} ranks")
    if prompts % parts:
        observed = f"{prompts} prompts do not divide by minibatches x ranks = {module.minibatches} x {ranks}"
        yield error(NAME, observed, size_cure(prompts, parts))
    length = data.pass_length or 0  # a stream has none
    rest = length % prompts
    if rest:
        whole = length // prompts
        observed = f"{rest} of {length} prompts are left over after the {whole} rollouts of a pass"
        cure = "none is lost, since the stream goes on where it stood; for whole passes add or drop prompts"
        yield warning(NAME, observed, cure)
    max_steps, max_batches = recipe.trainer.fit_loop.epoch_loop.max_steps, recipe.trainer.limit_train_batches
    for name, limit in (("max_steps", max_steps), ("limit_train_batches", max_batches)):
        # one that ends training in the middle of a rollout wastes samples
        if isinstance(limit, int) and limit > 0 and limit % steps:
            observed = f"{name}={limit} ends within a rollout, which serves {steps} optimizer steps"
            yield warning(NAME, observed, f"{name}={limit // steps * steps or steps}")
