"""Sampling mask: one bit for each token of the vocabulary that could be sampled at a position.

A mask has V/8 bytes for any filter, so its size is known in advance and all rollouts can be joined, with zeros as
padding. Lists of ids would be padded to the longest list of a rollout: a nucleus may have one token or half of the
vocabulary.
"""

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

BITS = 8


def to_bits(mask: Bool[Tensor, "... V"]) -> UInt8[Tensor, "... V8"]:
    """Pack eight tokens into a byte, the first in its lowest bit; the last byte is filled with 0.

    Example:
        >>> to_bits(torch.tensor([True, False, True, False, False, False, False, False, True]))
        tensor([5, 1], dtype=torch.uint8)
    """
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.shape[-1] % BITS))
    places = torch.arange(BITS, dtype=torch.uint8, device=mask.device)
    return (padded.unflatten(-1, (-1, BITS)) << places).sum(-1, dtype=torch.uint8)


def from_bits(bits: UInt8[Tensor, "... V8"], vocabulary: int) -> Bool[Tensor, "... V"]:
    """Invert :func:`to_bits`.

    Example:
        >>> from_bits(torch.tensor([5, 1], dtype=torch.uint8), 9).nonzero()[:, 0]
        tensor([0, 2, 8])
    """
    places = torch.arange(BITS, dtype=torch.uint8, device=bits.device)
    return (bits[..., None] >> places & 1).flatten(-2)[..., :vocabulary].bool()


def holds(bits: UInt8[Tensor, "... V8"], tokens: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """Return True for each token that is in the mask of its position.

    Example:
        >>> holds(torch.tensor([[5, 1], [5, 1]], dtype=torch.uint8), torch.tensor([8, 1])).tolist()
        [True, False]
    """
    byte = bits.gather(-1, (tokens // BITS)[..., None])[..., 0]
    return (byte >> (tokens % BITS).to(torch.uint8) & 1).bool()
