"""Check that all ranks start from the same values."""

import socket
from collections.abc import Mapping

from lightning_rl.distributed.collectives import process_count, process_objects
from lightning_rl.version import __version__

CURES = {
    "checkpoint": "put the checkpoints into a folder that all nodes share, and pass the same ckpt_path= on each",
    "policy": "give every rank the same model files, and a policy built with one seed",
    "reference": "give every rank the same model files",
    "data": "give every rank the same rows, in the same order",
    "lightning-rl": "install one version of lightning-rl on all nodes",
}


def check_process_group(world_size: int) -> None:
    """Raise RuntimeError unless the default process group has the ranks of the Trainer."""
    if process_count() != world_size:
        raise RuntimeError(
            f"expected a process group of {world_size} ranks as in the trainer, got {process_count()} ranks: "
            "do not start an engine or call init_process_group before trainer.fit"
        )


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
