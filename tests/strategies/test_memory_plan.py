"""Bytes that the doctor counts on each of two ranks, and those beside which an engine starts, lie there."""

from functools import partial
from typing import Any

import pytest
import torch
from kit.ranks import STRATEGIES, run_ranks
from kit.support import fit, tiny_module, tiny_prompts
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from typing_extensions import override

from lightning_rl.callbacks import ReferenceKL
from lightning_rl.policy.memory import MemoryPlan
from lightning_rl.run.memory_estimate import memory_plan


def held(tensors: Any) -> int:
    """Bytes of tensors on this rank."""
    given = [tensor for tensor in tensors if tensor is not None]
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in given]
    return sum(part.numel() * part.element_size() for part in parts)


class Look(Callback):
    """Keeps the plan at the start, and what lies there in the step."""

    def __init__(self) -> None:
        self.plans: list[MemoryPlan] = []
        self.resident: list[float] = []
        self.gradients: list[int] = []
        self.states: list[int] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.plans.append(memory_plan(pl_module.run, 3))
        self.resident.append(pl_module.run.weights.resident)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append(held(parameter.grad for parameter in pl_module.policy.parameters()))

    @override
    def on_train_batch_end(self, *arguments: Any, **keywords: Any) -> None:
        trainer: Trainer = arguments[0]
        states = [state for states in trainer.optimizers[0].state.values() for state in states.values()]
        self.states.append(held(state for state in states if isinstance(state, Tensor) and state.dim()))


@pytest.mark.nightly
def test_each_rank_holds_what_the_plan_says() -> None:
    run_ranks(__file__, 2)


def rank(strategy: str) -> None:
    """One of two ranks."""
    look = Look()
    module = tiny_module(optimizer=partial(AdamW, lr=1e-3))
    callbacks = [look, ReferenceKL(as_loss=True)]
    fit(module, callbacks=callbacks, data=tiny_prompts(8, 8), strategy=STRATEGIES[strategy](), devices=2)
    (plan,) = look.plans
    assert plan.weights == pytest.approx(held(module.required_policy.parameters()), rel=0.01)
    assert plan.gradients == pytest.approx(look.gradients[0], rel=0.01)
    assert plan.optimizer == pytest.approx(look.states[0], rel=0.01)
    reference: Any = module.models.reference
    assert plan.reference == held(reference.model.parameters()) == pytest.approx(plan.weights, rel=0.01)
    whole = plan.weights * (2 if strategy != "ddp" else 1)
    assert plan.buckets == (whole if strategy == "ddp" else 0)
    assert plan.replica == (0 if strategy == "ddp" else whole)
    assert (plan.gathered > 0) == (strategy != "ddp")
    trainer = plan.weights + plan.optimizer + plan.reference + plan.buckets
    assert look.resident == [pytest.approx(trainer, rel=0.01)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in ("ddp", "fsdp1", "fsdp2"):
        rank(each)
