"""Check that all ranks resume from the same checkpoint.

Nodes without a shared disk may find different files under one path, and would train from different steps.
"""

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from typing_extensions import override

from lightning_rl.checkpointing.checksum import contents_of, read_origin
from lightning_rl.distributed import check_agreement, process_count


class AgreeingConnector(_CheckpointConnector):
    """Checkpoint connector with the check of :func:`protect_resume`."""

    @override
    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        if process_count() > 1:
            check_agreement({"checkpoint": identity_of(checkpoint_path)})
        super().resume_start(checkpoint_path, weights_only)


def protect_resume(trainer: Trainer) -> None:
    """Make a Trainer refuse to load a checkpoint unless every rank loads the same one, or none."""
    connector = AgreeingConnector(trainer)
    vars(connector).update(vars(trainer._checkpoint_connector))  # noqa: SLF001  Lightning offers no hook before it loads
    trainer._checkpoint_connector = connector  # noqa: SLF001


def identity_of(checkpoint: Any) -> str:
    """Return run, step and checksum of the checkpoint that a rank is about to load, or that it is missing.

    Args:
        checkpoint: Path, or None to start a new run. Only the path is compared if it is not a local file.
    """
    if checkpoint is None:
        return "none (a new run)"
    path = Path(str(checkpoint))
    if "://" in str(checkpoint):
        return str(checkpoint)
    if not path.exists():
        return f"{path.name}, which is missing on its disk"
    origin = read_origin(path)
    if origin is None:
        return f"{path.name}, which cannot be read"
    return f"{path.name} of run {origin.run or '-'} at step {origin.step} (CRC-32 {contents_of(path)})"
