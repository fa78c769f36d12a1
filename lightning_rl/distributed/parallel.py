"""Parallel: interface to a strategy. This class is the single device; each other strategy has its own file."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_rl.distributed.collectives import Collectives, end_at_exit

DTYPES = {  # compute dtype by precision; the others compute in the dtype of the weights
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
}


class Accept(Protocol):
    """Callback that returns True if a step with this gradient norm is to be made, and counts the others."""

    def __call__(self, norm: Tensor, *, patient: bool = False) -> bool:
        """Return True to make the step; ``patient`` is True under a gradient scaler."""
        ...


class Parallel:
    """Interface to the strategy of a single device.

    Args:
        strategy: Strategy of the Trainer.

    Attributes:
        sharded: True if a rank holds only a part of the weights, so that generation needs a copy of the policy.
        repeats_steps: True if the gradient of a step can be accumulated again after memory ran out; False where ranks
            synchronize in every layer.
        compiles: True if parts of a layer can be compiled before the model is sharded.
        copies_gradients: True if a second copy of the gradients is held between optimizer steps.
        splits_first: True if a model can be sharded before its weights are loaded, so that each rank reads its part
            only.
    """

    sharded: bool = False
    splits_first: bool = False
    repeats_steps: bool = True
    compiles: bool = True
    copies_gradients: bool = False

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    @property
    def ranks(self) -> int:
        """Number of ranks over which the rows are split."""
        return int(getattr(self.strategy, "world_size", 1))

    @property
    def rank(self) -> int:
        """Index of this rank among them."""
        return int(getattr(self.strategy, "global_rank", 0))

    @property
    def optimizer(self) -> Optimizer | None:
        """Optimizer of the fit in progress; None outside of a fit."""
        module = self.strategy.lightning_module
        fits = module is not None and module.trainer.state.fn == TrainerFn.FITTING
        return self.strategy.optimizers[0] if fits and self.strategy.optimizers else None

    @cached_property
    def collectives(self) -> Collectives:
        """Collectives over the ranks; available once the strategy has set up its environment."""
        return Collectives()

    def check(self, max_grad_norm: float | None) -> None:
        """Check settings that would be silently wrong, and configure the strategy.

        Raises:
            ValueError: With the setting and the fix.
        """
        del max_grad_norm
        end_at_exit()
        if self.strategy.root_device.type == "mps":
            raise ValueError('expected a device with float64, which statistics need, got mps: use accelerator="cpu"')

    def compute_dtype(self, weights: torch.dtype) -> torch.dtype:
        """Return the dtype in which layers compute under the Trainer's precision, given the dtype of the weights."""
        return DTYPES.get(str(self.strategy.precision_plugin.precision), weights)

    def building(self) -> AbstractContextManager[object]:
        """Return a context for the construction of a model."""
        return nullcontext()

    def shard(self, model: nn.Module, layers: list[nn.Module], mesh: Any = None) -> nn.Module:
        """Shard a model over the ranks; ``layers`` are its largest parts that run as a whole."""
        del layers, mesh
        return model

    def shard_frozen(self, model: nn.Module, layers: list[nn.Module], mesh: Any = None) -> nn.Module:
        """Shard a frozen model, in the precision of the policy."""
        return self.shard(cast(nn.Module, self.strategy.precision_plugin.convert_module(model)), layers, mesh)

    def optimizer_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return parameter groups in the form that the optimizer's kernels need."""
        return groups

    def accumulating(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Return a context for a microbatch's forward and backward.

        Full gradients are reduced after the last microbatch of a step only. Sharded ones are reduce-scattered after
        each microbatch, because a rank cannot hold the full gradient in between.
        """
        del model, last
        return nullcontext()

    def step(self, model: nn.Module, optimizer: LightningOptimizer, accept: Accept) -> Tensor:
        """Step if the gradient norm is accepted, and return the norm; :meth:`clip` is called within the step."""
        scaler = self._scaler
        self.complete_gradient(model)
        norm = self.clipped_norm(model, torch.inf) / self.loss_scale
        if accept(norm, patient=scaler is not None) or scaler is not None:
            optimizer.step()  # a scaler skips the step by itself and lowers its scale
        return norm

    def clip(self, model: nn.Module, optimizer: Optimizer, limit: float) -> None:
        """Clip the gradient to ``limit``, after every hook before the optimizer step, as Lightning does."""
        scaled = getattr(
            optimizer, "_step_supports_amp_scaling", False
        )  # a fused optimizer divides by the scale itself
        self.clipped_norm(model, limit * self.loss_scale if scaled else limit)

    @property
    def loss_scale(self) -> float:
        """Factor of the gradient scaler on the loss; 1 without one."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    @property
    def _scaler(self) -> Any:
        """Gradient scaler under 16-mixed, else None."""
        return getattr(self.strategy.precision_plugin, "scaler", None)

    def clear(self, optimizer: LightningOptimizer) -> None:
        """Clear the gradient after a step."""
        optimizer.zero_grad()

    def complete_gradient(self, model: nn.Module) -> None:
        """Add up what ranks hold of the gradient of a whole step, before its norm is taken."""
        del model

    def clipped_norm(self, model: nn.Module, limit: float) -> Tensor:
        """Clip the gradient to ``limit``, infinity for none, and return its norm before clipping."""
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([cast(Tensor, parameter.grad) for parameter in parameters])
        if limit < torch.inf:
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def full_parameters(self, model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full value of each parameter, one at a time. Every rank has to iterate to the end.

        A value is valid until the next one; copy it to keep it, and ``del`` it, or two are in memory at once.

        Args:
            model: Policy, as wrapped by the strategy.
            dtype: Dtype that the caller converts to. Strategies that gather may convert the shards first, to send fewer
                bytes.
        """
        del dtype
        for name, parameter in model.named_parameters():
            yield name, parameter.detach()
