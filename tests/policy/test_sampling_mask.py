"""Kept tokens as bits: there and back, for any number of tokens."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.policy.sampling_mask import from_bits, holds, to_bits


@given(vocabulary=st.integers(1, 40), rows=st.integers(0, 3), seed=st.integers(0, 99))
def test_bits_hold_what_was_put_in(vocabulary: int, rows: int, seed: int) -> None:
    kept = torch.rand(rows, 2, vocabulary, generator=torch.Generator().manual_seed(seed)) > 0.5
    bits = to_bits(kept)
    assert bits.dtype == torch.uint8 and bits.shape == (rows, 2, -(-vocabulary // 8))
    assert torch.equal(from_bits(bits, vocabulary), kept)
    tokens = torch.arange(rows * 2).reshape(rows, 2) % vocabulary
    assert torch.equal(holds(bits, tokens), kept.gather(-1, tokens[..., None])[..., 0])


def test_padding_holds_nothing() -> None:
    assert not from_bits(torch.zeros(3, 2, dtype=torch.uint8), 9).any()
