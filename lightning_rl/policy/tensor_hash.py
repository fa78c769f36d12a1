"""Hash of tensors."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

SAMPLED = 256  # entries of each tensor


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


def hash_weights(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of the names, shapes and some entries of each tensor, including the first and last.

    Args:
        tensors: Full tensors on any device; only the sampled entries are copied.
    """
    return fingerprint((f"{name} {list(tensor.shape)}", _some_entries(tensor)) for name, tensor in tensors)


def _some_entries(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    places = torch.linspace(0, len(flat) - 1, min(len(flat), SAMPLED), dtype=torch.float64, device=flat.device)
    return flat[places.round().long()]
