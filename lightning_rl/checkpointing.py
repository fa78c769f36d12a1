"""Checkpoints that a kill cannot cut in half, and the newest of a folder."""

import os
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override

PART = ".part"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, then renames: ``Trainer(plugins=[AtomicCheckpointIO()])``.

    For strategies that write one file. Whatever moment the machine dies at, a checkpoint is there whole or not at all.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        part = Path(f"{path}{PART}")
        super().save_checkpoint(checkpoint, part, storage_options)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(path)


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The checkpoint of a folder that was finished last, or None; what a dying run was writing is left out."""
    found = [path for path in Path(folder).glob("*.ckpt") if not path.name.endswith(PART)]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
