"""Transfer: tensors on their way from main memory to an accelerator."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on ``device``; to a GPU through pinned memory, so that the host does not wait for the copy.

    What the same stream does with the result is queued behind the copy, and PyTorch gives pinned memory to nobody else
    before the copy is made. Copies to the host are always waited for: nobody could see that one is not there yet.
    """
    target = torch.device(device)
    if target.type != "cuda" or not tensor.is_cpu:
        return tensor.to(target)
    return tensor.contiguous().pin_memory().to(target, non_blocking=True)
