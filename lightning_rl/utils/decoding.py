"""Texts of completions as rewards and environments read them."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

ROLES = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id")


def hidden_tokens(tokenizer: PreTrainedTokenizerBase, ends: Collection[int] = ()) -> frozenset[int]:
    """Return the ids that texts of completions leave out: special tokens that begin, end or fill sequences.

    Other special tokens, such as ``<think>`` or ``<answer>`` in some vocabularies, are part of the texts.

    Args:
        tokenizer: Tokenizer of the ids.
        ends: Ids that end a response.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    roles = {getattr(tokenizer, role, None) for role in ROLES}
    return frozenset(special & {*ends, *roles})


def decode_completions(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]], ends: Collection[int] = ()
) -> list[str]:
    """Return the texts of completions, in one call of the tokenizer.

    Args:
        tokenizer: Tokenizer of the ids.
        rows: Token ids of each completion.
        ends: Ids that end a response.
    """
    hidden = hidden_tokens(tokenizer, ends)
    array: Any = np.empty(len(rows), dtype=object)  # the tokenizer inspects each token of a list, batch_decode always
    array[:] = [[token for token in row if token not in hidden] for row in rows]
    return list(tokenizer.decode(array, skip_special_tokens=False)) if len(rows) else []
