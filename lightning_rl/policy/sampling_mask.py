"""Sampling mask: which tokens of the vocabulary could be drawn at a position, one bit for each.

A set is V/8 bytes whatever the filter lets through, so its size is known before anything is drawn: a nucleus holds one
token here and half of the vocabulary there, and lists of ids would be padded to the longest of a whole rollout. Every
rollout has the same width, so rounds and microbatches join like those of any other field, and zeros are padding.
"""

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

BITS = 8


def to_bits(mask: Bool[Tensor, "... V"]) -> UInt8[Tensor, "... V8"]:
    """Eight tokens to a byte, the first of them in its lowest bit; the last byte is filled with 0.

    Example:
        >>> to_bits(torch.tensor([True, False, True, False, False, False, False, False, True]))
        tensor([5, 1], dtype=torch.uint8)
    """
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.shape[-1] % BITS))
    places = torch.arange(BITS, dtype=torch.uint8, device=mask.device)
    return (padded.unflatten(-1, (-1, BITS)) << places).sum(-1, dtype=torch.uint8)


def from_bits(bits: UInt8[Tensor, "... V8"], vocabulary: int) -> Bool[Tensor, "... V"]:
    """The inverse of :func:`to_bits`.

    Example:
        >>> from_bits(torch.tensor([5, 1], dtype=torch.uint8), 9).nonzero()[:, 0]
        tensor([0, 2, 8])
    """
    places = torch.arange(BITS, dtype=torch.uint8, device=bits.device)
    return (bits[..., None] >> places & 1).flatten(-2)[..., :vocabulary].bool()


def holds(bits: UInt8[Tensor, "... V8"], tokens: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """Whether each token is in the set beside it.

    Example:
        >>> holds(torch.tensor([[5, 1], [5, 1]], dtype=torch.uint8), torch.tensor([8, 1])).tolist()
        [True, False]
    """
    byte = bits.gather(-1, (tokens // BITS)[..., None])[..., 0]
    return (byte >> (tokens % BITS).to(torch.uint8) & 1).bool()
