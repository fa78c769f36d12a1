"""What a command prints: once, by the first rank, and nothing that a terminal would act on."""

import sys

import torch.distributed as dist

from lightning_rl import distributed
from lightning_rl.terminal import visible


def say(text: str) -> None:
    """Prints a text on the first rank, at once, with visible control characters: models and files write some."""
    if distributed.process_count() == 1 or dist.get_rank() == 0:
        sys.stdout.write(f"{visible(text)}\n")
        sys.stdout.flush()
