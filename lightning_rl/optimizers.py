"""Optimizers and learning-rate schedules for ``optimizer=`` and ``lr_scheduler=``."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lightning_rl.utils.arguments import check_counts

OptimizerBuilder = Callable[[list[dict[str, Any]]], Optimizer]
SchedulerBuilder = Callable[[Optimizer], LRScheduler]


def fused_adamw(parameters: list[dict[str, Any]], lr: float = 1e-6, weight_decay: float = 0.0) -> Optimizer:
    """Return fused AdamW, the default optimizer: ``RLLightningModule(optimizer=partial(fused_adamw, lr=1e-5))``.

    Args:
        parameters: Parameter groups.
        lr: Learning rate.
        weight_decay: Weight decay coefficient.
    """
    return AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=True)


class WarmupThenLinear(LambdaLR):
    """Linear warmup over ``warmup`` optimizer steps, then linear decay to 0 at step ``total``.

    Args:
        optimizer: Wrapped optimizer.
        warmup: Number of warmup steps.
        total: Number of optimizer steps of the run.

    Raises:
        ValueError: Unless ``0 <= warmup < total``.
    """

    def __init__(self, optimizer: Optimizer, warmup: int, total: int) -> None:
        _check_steps(warmup, total)

        def factor(step: int) -> float:
            return (step + 1) / warmup if step < warmup else max(0.0, (total - step) / (total - warmup))

        super().__init__(optimizer, factor)


def warmup_then_linear(warmup: int, total: int) -> SchedulerBuilder:
    """Return a builder of :class:`WarmupThenLinear`.

    Raises:
        ValueError: Unless ``0 <= warmup < total``.

    Example:
        >>> import torch
        >>> scheduler = warmup_then_linear(2, 4)(torch.optim.SGD([torch.zeros(1)], lr=1.0))
        >>> scheduler.get_last_lr()
        [0.5]
    """
    _check_steps(warmup, total)
    return partial(WarmupThenLinear, warmup=warmup, total=total)


def _check_steps(warmup: int, total: int) -> None:
    check_counts(0, warmup=warmup, total=total)
    if warmup >= total:
        raise ValueError(f"expected 0 <= warmup < total optimizer steps, got warmup={warmup} and total={total}")


def adamw_8bit(lr: float = 1e-6, **options: Any) -> OptimizerBuilder:
    """Return a builder of AdamW with 8-bit states: ``RLLightningModule(optimizer=adamw_8bit(lr=1e-6))``.

    Source: Dettmers et al. 2022, arXiv:2110.02861, as implemented by bitsandbytes.

    Args:
        lr: Learning rate.
        options: Further arguments of ``bitsandbytes.optim.AdamW8bit``.

    Raises:
        ImportError: If bitsandbytes is not installed.
    """
    try:
        optimizers = import_module("bitsandbytes").optim
    except ImportError as missing:
        raise ImportError("expected bitsandbytes for adamw_8bit: pip install 'lightning-rl[bitsandbytes]'") from missing
    return partial(optimizers.AdamW8bit, lr=lr, **options)
