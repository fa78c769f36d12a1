"""Buckets of bounded size that hold tensors one after the other; sender and receiver compute the same layout."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import UInt8
from torch import Tensor

from lightning_rl.generation.weights.weight_stream import Shape, Stream

ALIGNMENT = 16  # bytes; alignment of each tensor, for any dtype

Bytes = UInt8[Tensor, " N"]
Specification = tuple[str, Shape, str]
"""Name, shape and dtype of a tensor, such as ``("lm_head.weight", (16, 8), "bfloat16")``."""


class Piece(NamedTuple):
    """Position of a tensor in its bucket."""

    name: str
    shape: Shape
    dtype: torch.dtype
    start: int  # in bytes
    end: int

    def view(self, flat: Bytes) -> Tensor:
        """Return the tensor as a view of its bucket."""
        return flat[self.start : self.end].view(self.dtype).view(self.shape)


Bucket = list[Piece]


def cut(tensors: Sequence[Specification], bucket_bytes: int) -> list[Bucket]:
    """Return the layout of buckets for tensors in this order. A tensor larger than a bucket gets its own.

    Example:
        >>> buckets = cut([(name, (3,), "float32") for name in "abc"], 32)
        >>> [[(piece.name, piece.start) for piece in bucket] for bucket in buckets]
        [[('a', 0), ('b', 16)], [('c', 0)]]
    """
    buckets: list[Bucket] = []
    for name, shape, text in tensors:
        dtype: torch.dtype = getattr(torch, text)
        size = torch.Size(shape).numel() * dtype.itemsize
        start = -(-buckets[-1][-1].end // ALIGNMENT) * ALIGNMENT if buckets else 0
        if not buckets or start + size > bucket_bytes:
            buckets.append([])
            start = 0
        buckets[-1].append(Piece(name, tuple(shape), dtype, start, start + size))
    return buckets


def allocate(bucket: Bucket, device: torch.device) -> Bytes:
    """Return uninitialized memory for a bucket."""
    return torch.empty(bucket[-1].end, dtype=torch.uint8, device=device)


def pack(stream: Stream, buckets: Sequence[Bucket], device: torch.device) -> Iterator[Bytes]:
    """Yield the filled buckets of a stream, one at a time, with each tensor cast to the dtype of its piece.

    The last bucket is yielded after the end of the stream, so a stream that fails never looks complete.

    Raises:
        ValueError: If a tensor or the order differs from the layout.
    """
    tensors = iter(stream)
    for bucket in buckets:
        flat = allocate(bucket, device)
        for piece in bucket:
            name, weight = next(tensors, ("nothing", flat))
            if (name, tuple(weight.shape)) != (piece.name, piece.shape):
                raise ValueError(
                    f"expected {piece.name} {list(piece.shape)} next, as in the first sync, got {name} "
                    f"{list(weight.shape)}"
                )
            piece.view(flat).copy_(weight.detach())
            del weight
        if bucket is buckets[-1] and (more := next(tensors, None)) is not None:
            raise ValueError(f"expected {bucket[-1].name} to be the last tensor, got {more[0]} after it")
        yield flat


class Spare(NamedTuple):
    """Weights that were sent, in main memory."""

    flats: Sequence[Bytes]
    buckets: Sequence[Bucket]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield a copy of each tensor."""
        for flat, bucket in zip(self.flats, self.buckets, strict=True):
            for piece in bucket:
                yield piece.name, piece.view(flat).clone()
