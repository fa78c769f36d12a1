"""Learning-rate schedules as callables for ``lr_scheduler=``."""

from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler


def warmup_then_linear(warmup: int, total: int) -> Callable[[Optimizer], LRScheduler]:
    """Linear up over ``warmup`` optimizer steps, then linear down to 0 at step ``total``.

    Raises:
        ValueError: unless ``0 <= warmup < total``.

    Example:
        >>> import torch
        >>> scheduler = warmup_then_linear(2, 4)(torch.optim.SGD([torch.zeros(1)], lr=1.0))
        >>> scheduler.get_last_lr()
        [0.5]
    """
    if not 0 <= warmup < total:
        raise ValueError(f"expected 0 <= warmup < total, got {warmup} and {total}")

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / warmup if warmup else 1.0) * max(0.0, 1 - step / total)

    return lambda optimizer: LambdaLR(optimizer, factor)
