"""What a command prints: once, by the first rank."""

import sys

import torch.distributed as dist

from lightning_rl import distributed


def say(text: str) -> None:
    """Prints a text on the first rank, at once."""
    if distributed.process_count() == 1 or dist.get_rank() == 0:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
