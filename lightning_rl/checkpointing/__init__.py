"""Checkpoints: atomic writes, checksums, the newest of a folder, interrupts and export."""

from lightning_rl.checkpointing.agreement import check_agreement, protect_resume, weights_at_a_glance
from lightning_rl.checkpointing.atomic import AtomicCheckpointIO, CheckpointError, protect_checkpoints
from lightning_rl.checkpointing.export import read_checkpoint, restore_options, write_pretrained
from lightning_rl.checkpointing.folder import latest_checkpoint, new_run
from lightning_rl.checkpointing.interrupts import INTERRUPTED, FirstToHear, Interrupts
from lightning_rl.checkpointing.loops import protect_loops

__all__ = [
    "INTERRUPTED",
    "AtomicCheckpointIO",
    "CheckpointError",
    "FirstToHear",
    "Interrupts",
    "check_agreement",
    "latest_checkpoint",
    "new_run",
    "protect_checkpoints",
    "protect_loops",
    "protect_resume",
    "read_checkpoint",
    "restore_options",
    "weights_at_a_glance",
    "write_pretrained",
]
