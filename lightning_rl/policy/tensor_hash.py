"""Hash of tensors."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of names, shapes, dtypes and bytes, in order."""
    digest = hashlib.blake2b(digest_size=6)
    for name, tensor in tensors:
        local = getattr(tensor, "to_local", lambda own=tensor: own)()
        # clone: numpy would keep a reference to memory that FSDP1 reuses
        plain = local.detach().cpu().clone(memory_format=torch.contiguous_format)
        digest.update(f"{name} {list(plain.shape)} {plain.dtype}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
