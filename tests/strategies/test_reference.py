"""The reference is split like the policy and computes in its precision."""

import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.ranks import STRATEGIES, run_ranks
from kit.support import fit, tiny_module, tiny_policy, tiny_prompts
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from typing_extensions import override

from lightning_rl import RLCallback
from lightning_rl.callbacks import ReferenceKL

SPLIT = {"fsdp1", "fsdp2", "tensor", "zero3"}


class Watch(RLCallback):
    """Keeps how far a policy that never moves is from its reference, and how much of that a rank holds."""

    name = "watch"

    def __init__(self) -> None:
        self.apart: list[float] = []
        self.held = 0
        self.whole = sum(parameter.numel() for parameter in tiny_policy().parameters())
        self.buffers: set[torch.dtype] = set()

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
        self.apart.append(pl_module.run.metrics.values()["kl/ref"])
        parts = list(pl_module.models.reference.scoring.parameters())
        self.held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parts)
        for model in (pl_module.policy, pl_module.models.reference.scoring):
            self.buffers |= {buffer.dtype for buffer in model.buffers()}


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_two_ranks_hold_the_reference_under_every_strategy(precision: str) -> None:
    run_ranks(__file__, 2, *(f"{strategy}:{precision}" for strategy in STRATEGIES))


def rank(strategy: str, precision: Any) -> None:
    """One of two ranks; the learning rate is 0."""
    watch = Watch()
    module = tiny_module(policy=partial(tiny_policy, dtype=torch.float32), optimizer=partial(SGD, lr=0.0))
    callbacks = [ReferenceKL(0.1, as_loss=True), watch]
    where = STRATEGIES[strategy]()
    fit(module, callbacks=callbacks, data=tiny_prompts(4, 4), strategy=where, devices=2, precision=precision)
    assert watch.apart and not any(watch.apart), f"{strategy} {precision}: {watch.apart}"
    held, whole = torch.tensor(watch.held), watch.whole
    dist.all_reduce(held)
    assert watch.buffers == {torch.float32}, f"{strategy} {precision}: {watch.buffers}"
    copies = int(held) / whole
    assert copies == pytest.approx(1.0 if strategy in SPLIT else 2.0, rel=0.1), f"{strategy} {precision}: {copies}"


if __name__ == "__main__":
    for run in sys.argv[1:]:
        rank(*run.split(":"))
