"""Parallel: what the loop asks of a strategy. This class is the single device; each other strategy has its own file."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_rl.distributed.collectives import Collectives, end_at_exit

DTYPES = {  # of the precisions that are not that of the weights
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
}


class Accept(Protocol):
    """Whether a step with this gradient norm is made; counts those that are not, patiently under a gradient scaler."""

    def __call__(self, norm: Tensor, *, patient: bool = False) -> bool:
        """Decides."""
        ...


class Parallel:
    """One device.

    Args:
        strategy: of the Trainer.

    Attributes:
        sharded: whether a rank holds only a part of the weights, so that nobody can decode with the policy itself.
        repeats_steps: whether the gradient of a step can be thrown away and accumulated anew after memory ran out:
            where ranks meet in every layer, one that breaks off leaves the others waiting.
        compiles: whether parts of a layer can be compiled before it splits a model.
        splits_first: whether a model can be split before it has numbers, so that each rank reads its part alone.
    """

    sharded: bool = False
    splits_first: bool = False
    repeats_steps: bool = True
    compiles: bool = True

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    @property
    def ranks(self) -> int:
        """Over how many ranks the rows are split."""
        return int(getattr(self.strategy, "world_size", 1))

    @property
    def rank(self) -> int:
        """Which of them this one is."""
        return int(getattr(self.strategy, "global_rank", 0))

    @cached_property
    def collectives(self) -> Collectives:
        """What its ranks do together; there once the strategy has set its environment up."""
        return Collectives()

    def check(self, max_grad_norm: float | None) -> None:
        """Refuses what would be silently wrong, and sets what the strategy needs to know.

        Raises:
            ValueError: naming the setting and the fix.
        """
        del max_grad_norm
        end_at_exit()
        if self.strategy.root_device.type == "mps":
            raise ValueError('expected a device with float64, which statistics need, got mps: use accelerator="cpu"')

    def compute_dtype(self, weights: torch.dtype) -> torch.dtype:
        """Return the dtype in which layers compute under the Trainer's precision, given the dtype of the weights."""
        return DTYPES.get(str(self.strategy.precision_plugin.precision), weights)

    def building(self) -> AbstractContextManager[object]:
        """Around the construction of a model."""
        return nullcontext()

    def shard(self, model: nn.Module, layers: list[nn.Module], mesh: Any = None) -> nn.Module:
        """Splits a model over the ranks; ``layers`` are its largest parts that run as a whole."""
        del layers, mesh
        return model

    def shard_frozen(self, model: nn.Module, layers: list[nn.Module], mesh: Any = None) -> nn.Module:
        """The same for a model that nobody trains, in the precision of the policy."""
        return self.shard(cast(nn.Module, self.strategy.precision_plugin.convert_module(model)), layers, mesh)

    def optimizer_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Parameter groups as the optimizer's kernels can take them."""
        return groups

    def accumulating(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Around a microbatch's forward and backward.

        Whole gradients are exchanged after the last microbatch of a step alone. Where a rank holds its part, each
        microbatch ends with a reduce-scatter, or every rank would hold the whole gradient in between.
        """
        del model, last
        return nullcontext()

    def step(self, model: nn.Module, optimizer: LightningOptimizer, limit: float | None, accept: Accept) -> Tensor:
        """Clips the gradient to ``limit`` and steps if the norm is accepted; returns the norm before clipping."""
        scaler = getattr(self.strategy.precision_plugin, "scaler", None)  # under 16-mixed
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        norm = self.clipped_norm(model, torch.inf if limit is None else limit * scale) / scale
        if accept(norm, patient=scaler is not None) or scaler is not None:
            optimizer.step()  # a scaler leaves the step out by itself, and lowers its scale
        return norm

    def clear(self, optimizer: LightningOptimizer) -> None:
        """Clears the gradient once the step was made."""
        optimizer.zero_grad()

    def clipped_norm(self, model: nn.Module, limit: float) -> Tensor:
        """The gradient norm before clipping, after which the gradient is scaled down to ``limit``."""
        return nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=None)

    def full_parameters(self, model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Name and full value of each parameter, one at a time. Every rank iterates to the end.

        A value is lent: copy what has to outlive the next one, and ``del`` it, or two are held at once.

        Args:
            model: the policy, as the strategy has wrapped it.
            dtype: that whoever reads the values rounds them to. A strategy that gathers each by itself rounds the parts
                before, so that fewer bytes travel; others leave them as they are.
        """
        del dtype
        for name, parameter in model.named_parameters():
            yield name, parameter.detach()
