"""Batches: do prompts, groups, minibatches, ranks and steps divide each other?"""

from collections.abc import Iterator

from lightning.pytorch import Trainer

from lightning_rl.cli.doctor.finding import Finding, error, fact, warning
from lightning_rl.cli.recipes import Reached
from lightning_rl.distributed import FSDP2Strategy

NAME = "batches"


def batches(given: Reached) -> Iterator[Finding]:
    """A rollout splits into whole groups for each minibatch and rank, and training ends with a whole rollout."""
    module, data, ranks = given.module, given.data, _ranks(given.trainer)
    prompts, steps, parts = data.prompts_per_rollout, module.steps_per_rollout, module.minibatches * ranks
    shape = f"{prompts} prompts x {module.group_size} samples"
    yield fact(NAME, f"{shape} for each rollout, which serves {steps} optimizer steps; {ranks} ranks")
    if prompts % parts:
        below = prompts // parts * parts
        near = " or ".join(str(one) for one in (below, below + parts) if one)
        yield error(
            NAME, f"{prompts} prompts do not divide by minibatches x ranks = {module.minibatches} x {ranks}",
            f"prompts_per_rollout={near}, or other minibatches=",
        )  # fmt: skip
    left = len(data.rows) % prompts
    if left:
        passed = len(data.rows) // prompts
        yield warning(
            NAME, f"{left} of {len(data.rows)} prompts are left over after the {passed} rollouts of a pass",
            "none is lost, since the stream goes on where it stood; for whole passes add or drop prompts",
        )  # fmt: skip
    yield from _cut(given, steps)


def _ranks(trainer: Trainer) -> int:
    """Over how many ranks the rows are split; those that split layers between them work on the same rows."""
    if isinstance(trainer.strategy, FSDP2Strategy):
        return trainer.world_size // int(trainer.strategy._tensor_parallel_size)  # noqa: SLF001
    return trainer.world_size


def _cut(given: Reached, steps: int) -> Iterator[Finding]:
    """A limit of the Trainer that ends training in the middle of a rollout wastes samples."""
    loop, trainer = given.trainer.fit_loop, given.trainer
    limits = {"max_steps": loop.epoch_loop.max_steps, "limit_train_batches": trainer.limit_train_batches}
    for name, limit in limits.items():
        if isinstance(limit, int) and limit > 0 and limit % steps:
            yield warning(
                NAME, f"{name}={limit} ends within a rollout, which serves {steps} optimizer steps",
                f"{name}={limit // steps * steps or steps}",
            )  # fmt: skip
