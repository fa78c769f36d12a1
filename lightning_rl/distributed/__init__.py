"""Code that depends on the strategy: sums over ranks, sharding, accumulation, clipping, full weights."""

from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)

from lightning_rl.distributed.agreement import check_agreement, check_process_group
from lightning_rl.distributed.collectives import (
    ALONE,
    Alone,
    Collectives,
    RunEndError,
    failing_together,
    meet,
    process_count,
    process_maximum,
    process_objects,
)
from lightning_rl.distributed.ddp import DataParallel
from lightning_rl.distributed.fsdp1 import FullyShardedDataParallel1, unwrapped_name
from lightning_rl.distributed.fsdp2 import FSDP2Strategy, FullyShardedDataParallel2
from lightning_rl.distributed.network import cure_of
from lightning_rl.distributed.parallel import Parallel
from lightning_rl.distributed.zero import ZeRO

__all__ = [
    "ALONE",
    "Alone",
    "Collectives",
    "FSDP2Strategy",
    "Parallel",
    "RunEndError",
    "check_agreement",
    "check_process_group",
    "cure_of",
    "failing_together",
    "meet",
    "parallel_of",
    "process_count",
    "process_maximum",
    "process_objects",
    "unwrapped_name",
]

KINDS: tuple[tuple[type[Strategy], type[Parallel]], ...] = (
    (DeepSpeedStrategy, ZeRO),  # derives from DDPStrategy, so it comes first
    (DDPStrategy, DataParallel),
    (FSDPStrategy, FullyShardedDataParallel1),
    (ModelParallelStrategy, FullyShardedDataParallel2),
    (SingleDeviceStrategy, Parallel),
)


def parallel_of(strategy: Strategy) -> Parallel:
    """Return the :class:`Parallel` of the Trainer's strategy.

    Raises:
        ValueError: If the strategy is not supported; with the supported ones.
    """
    for theirs, ours in KINDS:
        if isinstance(strategy, theirs):
            return ours(strategy)
    known = ", ".join(theirs.__name__ for theirs, _ in KINDS)
    raise ValueError(f"expected a strategy out of {known}, got {type(strategy).__name__}")
