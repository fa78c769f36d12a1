"""Checkpoints: atomic writes, checksums, the newest of a folder, fault tolerance and export."""

from lightning_rl.checkpointing.atomic import AtomicCheckpointIO, CheckpointError, protect_checkpoints
from lightning_rl.checkpointing.checkpoint_folder import latest_checkpoint, new_run
from lightning_rl.checkpointing.fault_tolerance import INTERRUPTED, FaultTolerance
from lightning_rl.checkpointing.optimizer_options import ConfiguredOptimizer, OptimizerChange
from lightning_rl.checkpointing.pretrained import (
    KEPT,
    LostCodeError,
    keep_arguments,
    read_checkpoint,
    restore_module,
    restore_options,
    write_pretrained,
)
from lightning_rl.checkpointing.resume import protect_resume

__all__ = [
    "INTERRUPTED",
    "KEPT",
    "AtomicCheckpointIO",
    "CheckpointError",
    "ConfiguredOptimizer",
    "FaultTolerance",
    "LostCodeError",
    "OptimizerChange",
    "keep_arguments",
    "latest_checkpoint",
    "new_run",
    "protect_checkpoints",
    "protect_resume",
    "read_checkpoint",
    "restore_module",
    "restore_options",
    "write_pretrained",
]
