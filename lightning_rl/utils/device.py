"""Copies of tensors from main memory to an accelerator."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return the tensor on ``device``; copies to a GPU go through pinned memory and do not block the host.

    Later work on the same stream waits for the copy, and PyTorch reuses pinned memory only after it. Copies to the host
    block.
    """
    target = torch.device(device)
    if target.type != "cuda" or not tensor.is_cpu:
        return tensor.to(target)
    return tensor.contiguous().pin_memory().to(target, non_blocking=True)
