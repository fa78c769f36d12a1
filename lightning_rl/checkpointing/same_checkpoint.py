"""Identity of a checkpoint, by which ranks compare what they are about to load.

Nodes without a shared disk may find different files under one path, and would train from different steps.
"""

from pathlib import Path
from typing import Any

from lightning_rl.checkpointing.checksum import contents_of, read_origin


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
