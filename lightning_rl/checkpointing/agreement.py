"""Agreement: all ranks begin a run alike, from one checkpoint, with the same weights and rows, or not at all.

Two nodes with disks of their own may find different files under one path. Without this they train on together, from
different steps, until one has no data left.
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

from lightning_rl.checkpointing.seal import digest_in, read_seal
from lightning_rl.distributed.collectives import process_count, process_objects
from lightning_rl.policy.fingerprint import fingerprint
from lightning_rl.version import __version__

LOOKED_AT = 256  # entries of each tensor
SHOWN = 12  # digits of a digest
CURES = {
    "checkpoint": "put the checkpoints into a folder that all nodes share, and pass the same ckpt_path= on each",
    "policy": "give every rank the same model files, and a policy that is built under one seed",
    "reference": "give every rank the same model files",
    "data": "give every rank the same rows, in the same order",
    "lightning-rl": "install one version of lightning-rl on all nodes",
}


class AgreeingConnector(_CheckpointConnector):
    """What :func:`protect_resume` adds to what loads a checkpoint."""

    @override
    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        if process_count() > 1:
            check_agreement({"checkpoint": identity_of(checkpoint_path)})
        super().resume_start(checkpoint_path, weights_only)


def protect_resume(trainer: Trainer) -> None:
    """Lets a Trainer load no checkpoint unless every rank is about to load the same one, or none."""
    trainer._checkpoint_connector.__class__ = AgreeingConnector  # noqa: SLF001  as its loops and its strategy


def weights_at_a_glance(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of names, shapes and some entries of each tensor, the first and the last one among them.

    Args:
        tensors: whole, on any device; none is copied whole.
    """
    return fingerprint((f"{name} {list(tensor.shape)}", _some_entries(tensor)) for name, tensor in tensors)


def _some_entries(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    places = torch.linspace(0, len(flat) - 1, min(len(flat), LOOKED_AT), dtype=torch.float64, device=flat.device)
    return flat[places.round().long()]


def identity_of(checkpoint: Any) -> str:
    """What a rank sees of the checkpoint that it is about to load: what its seal says, or that it is not there.

    Args:
        checkpoint: the path, or None to begin anew. Of one that does not lie on a disk the path alone is compared.
    """
    if checkpoint is None:
        return "none, it begins anew"
    path = Path(str(checkpoint))
    if "://" in str(checkpoint):
        return str(checkpoint)
    if not path.exists():
        return f"{path.name}, which is not on its disk"
    seal = read_seal(path)
    if seal is None:
        return path.name
    return f"{path.name} of run {seal.run or '-'} at step {seal.step} (SHA-256 {digest_in(path)[:SHOWN]})"


def check_agreement(mine: Mapping[str, str]) -> None:
    """Compares what the ranks begin with. Every rank calls it.

    Args:
        mine: what this rank begins with, by the keys of :data:`CURES`.

    Raises:
        ValueError: on every rank, if two ranks differ: with what both have, and what to do.
    """
    sides = process_objects((socket.gethostname(), {**mine, "lightning-rl": __version__}))
    (first_host, first), *others = sides
    for rank, (host, other) in enumerate(others, 1):
        for what, cure in CURES.items():
            if first.get(what) != other.get(what):
                raise ValueError(
                    f"expected all ranks to begin alike, got as {what} {first.get(what)} on rank 0 ({first_host}) and "
                    f"{other.get(what)} on rank {rank} ({host}): {cure}"
                )
