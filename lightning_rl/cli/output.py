"""Output of commands, on the first rank only and with control characters escaped."""

import sys

import torch.distributed as dist

from lightning_rl import distributed
from lightning_rl.utils.terminal import visible


def say(text: str) -> None:
    """Print a text on the first rank and flush; control characters of models and files are escaped."""
    if distributed.process_count() == 1 or dist.get_rank() == 0:
        sys.stdout.write(f"{visible(text)}\n")
        sys.stdout.flush()
