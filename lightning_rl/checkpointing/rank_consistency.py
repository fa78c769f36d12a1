"""Check that all ranks start from the same checkpoint, weights and data.

Nodes without a shared disk may find different files under one path, and would train from different steps.
"""

import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch import Tensor
from typing_extensions import override

from lightning_rl.checkpointing.checksum import contents_of, read_origin
from lightning_rl.distributed.collectives import process_count, process_objects
from lightning_rl.policy.tensor_hash import fingerprint
from lightning_rl.version import __version__

LOOKED_AT = 256  # sampled entries of each tensor
CURES = {
    "checkpoint": "put the checkpoints into a folder that all nodes share, and pass the same ckpt_path= on each",
    "policy": "give every rank the same model files, and a policy built with one seed",
    "reference": "give every rank the same model files",
    "data": "give every rank the same rows, in the same order",
    "lightning-rl": "install one version of lightning-rl on all nodes",
}


class AgreeingConnector(_CheckpointConnector):
    """Checkpoint connector with the check of :func:`protect_resume`."""

    @override
    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        if process_count() > 1:
            check_agreement({"checkpoint": identity_of(checkpoint_path)})
        super().resume_start(checkpoint_path, weights_only)


def protect_resume(trainer: Trainer) -> None:
    """Make a Trainer refuse to load a checkpoint unless every rank loads the same one, or none."""
    trainer._checkpoint_connector.__class__ = AgreeingConnector  # noqa: SLF001  like its loops and its strategy


def hash_weights(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of the names, shapes and some entries of each tensor, including the first and last.

    Args:
        tensors: Full tensors on any device; only the sampled entries are copied.
    """
    return fingerprint((f"{name} {list(tensor.shape)}", _some_entries(tensor)) for name, tensor in tensors)


def _some_entries(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    places = torch.linspace(0, len(flat) - 1, min(len(flat), LOOKED_AT), dtype=torch.float64, device=flat.device)
    return flat[places.round().long()]


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


def check_agreement(mine: Mapping[str, str]) -> None:
    """Compare the starting points of all ranks; a collective call.

    Args:
        mine: Starting point of this rank, with the keys of :data:`CURES`.

    Raises:
        ValueError: On every rank, if two ranks differ; the message names both values and the fix.
    """
    sides = process_objects((socket.gethostname(), {**mine, "lightning-rl": __version__}))
    (first_host, first), *others = sides
    for rank, (host, other) in enumerate(others, 1):
        for what, cure in CURES.items():
            if first.get(what) != other.get(what):
                raise ValueError(
                    f"expected the same {what} on all ranks, got {first.get(what)} on rank 0 ({first_host}) and "
                    f"{other.get(what)} on rank {rank} ({host}): {cure}"
                )
