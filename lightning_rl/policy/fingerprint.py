"""Fingerprint: one short hash of many tensors, equal exactly if all of them are."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of names, shapes, types and bytes, in order."""
    digest = hashlib.blake2b(digest_size=6)
    for name, tensor in tensors:
        local = getattr(tensor, "to_local", lambda own=tensor: own)()
        # A clone, because numpy would pin memory that FSDP1 only lends.
        plain = local.detach().cpu().clone(memory_format=torch.contiguous_format)
        digest.update(f"{name} {list(plain.shape)} {plain.dtype}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
