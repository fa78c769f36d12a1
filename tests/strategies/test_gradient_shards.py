"""A rank never holds a whole gradient under FSDP: each microbatch ends with its part of the sum."""

from functools import partial
from typing import Any, cast

import pytest
import torch
from kit.ranks import STRATEGIES, run_ranks
from kit.support import fit, tiny_module, tiny_policy, tiny_prompts
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from typing_extensions import override


def held_gradients(model: nn.Module) -> tuple[int, int]:
    """Entries of gradients that a rank holds: of whole parameters, and of its parts of them."""
    whole, parts = list[Tensor | None](), list[Tensor | None]()
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            group: Any = unit._get_fsdp_state()._fsdp_param_group  # noqa: SLF001  public nowhere
            for parameter in group.fsdp_params:
                whole += [parameter.unsharded_accumulated_grad]
                whole += [parameter._unsharded_param.grad] if hasattr(parameter, "_unsharded_param") else []  # noqa: SLF001
                gradient = parameter.sharded_param.grad
                parts += [gradient.to_local() if isinstance(gradient, DTensor) else gradient]
        if isinstance(unit, FullyShardedDataParallel):
            flat: Any = cast(Any, unit)._handle.flat_param  # noqa: SLF001  public nowhere
            (parts if flat.grad is None or len(flat.grad) == len(flat._local_shard) else whole).append(flat.grad)  # noqa: SLF001
    return sum(g.numel() for g in whole if g is not None), sum(g.numel() for g in parts if g is not None)


class Watch(Callback):
    """Keeps what is held after the backward of each microbatch of each step."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, int]]] = [[]]

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        self.steps[-1].append(held_gradients(pl_module.policy))

    @override
    def on_train_batch_end(self, *arguments: Any, **keywords: Any) -> None:
        self.steps.append([])


@pytest.mark.nightly
def test_no_rank_holds_a_whole_gradient_between_microbatches() -> None:
    run_ranks(__file__, 2)


def rank(strategy: str) -> None:
    """One of two ranks."""
    watch, entries = Watch(), sum(parameter.numel() for parameter in tiny_policy().parameters())
    module = tiny_module(optimizer=partial(SGD, lr=0.05), max_tokens_per_microbatch=20)
    where = STRATEGIES[strategy]()
    fit(module, callbacks=[watch], data=tiny_prompts(8, 8), strategy=where, devices=2)
    steps = [step for step in watch.steps if step]
    assert steps and all(len(step) > 1 for step in steps)
    for step in steps:
        for whole, parts in step:
            assert whole == 0, f"{strategy}: {whole} of {entries} entries are whole"
            assert parts == pytest.approx(entries / 2, rel=0.01)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in ("fsdp1", "fsdp2"):
        rank(each)
