"""Layouts: rows of a rollout joined into model inputs without padding, and attention within each sequence.

A row is a sequence of prompt and response, or several if contexts were rewritten or forked: one for each branch of its
segments, from a root to a leaf. A token that several branches have is predicted in the first one, and read in the
others. Packed, all sequences of a microbatch form one row: linear layers run only on real tokens, and the attention
registered here (:mod:`lightning_rl.policy.attention`) runs on each sequence separately, without a block-diagonal mask.
The last token of a sequence predicts nothing and is left out.

Samples of a group have the same prompt, whose hidden states are equal by causality. Packed, it is in the inputs once,
and attention reads its keys and values with each sample.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lightning_rl.fields import spans
from lightning_rl.policy.attention import AUTO, PackedSequences, Shared, attend
from lightning_rl.policy.batch_invariance import INVARIANT_ATTENTION
from lightning_rl.policy.media import MediaInputs, media_inputs
from lightning_rl.policy.sequences import sequences_of
from lightning_rl.rollout import EXPERT_LOAD, Rollout, join_tokens
from lightning_rl.utils.device import to_device

PACKED_ATTENTION = "lightning_rl_packed"
_GATHERED = {"gathered": True}  # from the entry of token_extras of this name, at the valid tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Model inputs for rows of a rollout, and the position of each valid token's prediction in the output.

    Prompt 3, 4 with response 5, 1: input_ids [[3, 4, 5]], source [1, 2], targets [5, 1], rows [0, 0], columns [0, 1].

    A token's prediction is one position before it. With N packed positions the inputs are [1, N]. Padded, they are [s,
    S], one line per sequence, padded on the right, where no loss is computed and thus no attention mask is needed. A
    prompt that packed sequences share is in the inputs once.
    """

    input_ids: Int[Tensor, "R N"]
    position_ids: Int[Tensor, "R N"]
    source: Int[Tensor, " A"]  # of the prediction in the flattened output
    targets: Int[Tensor, " A"]
    rows: Int[Tensor, " A"]
    columns: Int[Tensor, " A"]
    lengths: tuple[tuple[int, int], ...]  # queries and keys of packed sequences; empty if padded
    cu_queries: Int[Tensor, " b1"]  # cumulative numbers, int32
    cu_keys: Int[Tensor, " b1"]
    shape: tuple[int, int]  # [b, T] of the rows
    shared: Shared | None = None  # None if sequences share no inputs
    # bits of the tokens that passed the filters
    sampling_mask: UInt8[Tensor, "A V8"] | None = field(default=None, metadata=_GATHERED)
    top_ids: Int[Tensor, "A K"] | None = field(default=None, metadata=_GATHERED)  # likeliest tokens of the engine
    top_logprobs: Float[Tensor, "A K"] | None = field(default=None, metadata=_GATHERED)
    expert_load: Float[Tensor, "b E"] | None = None  # in the optimizer step of each row
    media: MediaInputs | None = None  # None without pictures

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence that the model reads."""
        return max(keys for _, keys in self.lengths) if self.lengths else self.input_ids.shape[1]

    def to(self, device: torch.device | str) -> "Layout":
        """Move every tensor to ``device``."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        moved: dict[str, Any] = {
            name: to_device(value, device) for name, value in values.items() if isinstance(value, Tensor)
        }
        shared = self.shared and Shared(*(to_device(index, device) for index in self.shared))
        return replace(self, **moved, shared=shared, media=self.media and self.media.to(device))

    def scatter(self, flat: Tensor) -> Tensor:
        """Scatter one value per valid token [A] into [b, T], with 0 elsewhere; differentiable."""
        return flat.new_zeros(self.shape).index_put((self.rows, self.columns), flat)


GATHERED = tuple(spec.name for spec in fields(Layout) if spec.metadata)
"""Entries of ``token_extras`` that the forward reads."""


def pack(rows: Rollout, *, packed: bool = True, chosen: Bool[Tensor, " s"] | None = None) -> Layout:
    """Join prompt and response of every row and locate the prediction of every valid token.

    Args:
        rows: Rows.
        packed: False for padding on the right.
        chosen: Sequences of the rows that predict the valid tokens, and are laid out; None for all.

    Raises:
        ValueError: If a valid token is in the padding, or begins a context.
    """
    sequences, (row, column) = sequences_of(rows, chosen), rows.valid_tokens.nonzero(as_tuple=True)
    if (outside := column >= rows.response_lengths.index_select(0, row)).any():
        first = int(outside.nonzero()[0, 0])
        raise ValueError(
            f"expected valid_tokens to be positions of responses, got position {column[first]} of row {row[first]}, "
            f"whose response has {rows.response_lengths[row[first]]} tokens: derive it from action_mask"
        )
    tokens = sequences.gather(join_tokens(rows, rows.prompt_ids, rows.response_ids))
    drawn, ends = sequences.find(row, column), sequences.lengths.cumsum(0)
    begins = torch.zeros_like(tokens, dtype=torch.bool).index_fill(0, ends - sequences.lengths, value=True)
    if begins.index_select(0, drawn).any():
        raise ValueError("expected a context to begin with tokens that were read, got a sampled token")
    is_input = torch.ones_like(tokens, dtype=torch.bool)
    is_input[ends - 1] = sequences.lengths == 1  # the only token of a sequence is an input
    inputs, source = tokens.masked_select(is_input), (is_input.cumsum(0) - 1).index_select(0, drawn - 1)
    lengths = sequences.inputs
    line = torch.arange(len(lengths), device=inputs.device).repeat_interleave(lengths, output_size=len(inputs))
    starts, shared, queries = lengths.cumsum(0) - lengths, None, lengths
    position = torch.arange(len(inputs), device=inputs.device) - starts.index_select(0, line)
    size = len(lengths), int(lengths.max())
    place, borrows = position + line * size[1], torch.zeros_like(lengths, dtype=torch.bool)
    own = torch.ones_like(inputs, dtype=torch.bool)
    if packed and bool(sequences.common.any()):
        own = position >= sequences.common.index_select(0, line)
        number = own.cumsum(0) - 1  # input index of each token
        lent = starts[sequences.lender].index_select(0, line) + position
        number = torch.where(own, number, number.index_select(0, torch.where(own, 0, lent)))
        borrows, queries = sequences.common > 0, lengths - sequences.common
        order = (queries * (len(inputs) + 1) + lengths).argsort(descending=True, stable=True)  # equal lengths together
        order = order[: int(queries.count_nonzero())]  # the only token of a response is no query
        keys = spans(starts[order], lengths[order])
        read, is_query = number.index_select(0, keys), own.index_select(0, keys)
        shared = Shared(read, asked := read.masked_select(is_query), _inverse(asked))
        lengths, queries = lengths[order], queries[order]
        inputs, position = inputs.masked_select(own), position.masked_select(own)
        source = number.index_select(0, source)
    sizes = tuple(zip(queries.tolist(), lengths.tolist(), strict=True))
    packed = shared is not None or (packed and len(set(sizes)) > 1)  # equal lengths need no packing
    if not packed:
        padded = inputs.new_zeros(size[0] * size[1]).index_copy(0, place, inputs)  # put_ is not deterministic
        inputs, source = padded.view(size), place.index_select(0, source)
        position = torch.arange(size[1], device=inputs.device).expand(size)
    return Layout(
        input_ids=inputs[None] if packed else inputs,
        position_ids=position[None] if packed else position,
        source=source,
        targets=tokens.index_select(0, drawn),
        rows=row,
        columns=column,
        lengths=sizes if packed else (),
        cu_queries=functional.pad(queries.cumsum(0), (1, 0)).to(torch.int32),
        cu_keys=functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        shape=(len(rows), rows.width),
        shared=shared,
        expert_load=rows.extras.get(EXPERT_LOAD),
        media=media_inputs(sequences, is_input, place, size, own=own if packed else None, borrows=borrows),
        **{name: rows.token_extras[name][row, column] for name in GATHERED if name in rows.token_extras},
    )


def _inverse(permutation: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
    """Return the place of each index in a permutation."""
    places = torch.arange(len(permutation), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, places)


_FORWARD: ContextVar[str | None] = ContextVar("forward", default=None)  # "packed" or "padded" inside our forward


@contextmanager
def packed_attention(
    layout: Layout, *, implementation: str | None = PACKED_ATTENTION, attention: str = AUTO
) -> Iterator[dict[str, Any]]:
    """Yield the keyword arguments that pass sequence boundaries through the model to its attention.

    They are arguments because activation checkpointing runs attention again in the backward, after this context has
    ended. Only the mask, which is built once outside of the layers, depends on the context.

    Args:
        layout: Layout of the microbatch.
        implementation: Attention implementation of the model. Our own get an all-true mask: without one transformers
            searches the positions for sequences, which synchronizes the accelerator.
        attention: Kernel for the sequences.
    """
    token = _FORWARD.set("packed" if layout.lengths else "padded")
    masked = implementation in (PACKED_ATTENTION, INVARIANT_ATTENTION)
    arguments: dict[str, Any] = (
        {"attention_mask": torch.ones_like(layout.input_ids, dtype=torch.bool)} if masked else {}
    )
    if layout.lengths:
        sequences = PackedSequences(layout.lengths, layout.cu_queries, layout.cu_keys, attention, layout.shared)
        arguments["packed_sequences"] = sequences
    try:
        yield arguments
    finally:
        _FORWARD.reset(token)


class PackingError(ValueError):
    """A layer cannot read packed sequences; the message says what to do."""


def packed_attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute attention for a layer of transformers: packed sequences separately, everything else with sdpa.

    Raises:
        PackingError: If a model drops the boundaries, or uses an option that packed attention does not support.
    """
    sequences: PackedSequences | None = arguments.pop("packed_sequences", None)
    if sequences is None:
        if _FORWARD.get() == "packed":
            raise PackingError(
                f"{type(module).__name__} drops the sequence boundaries: use packing=False for this model"
            )
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    unsupported = [name for name in ("softcap", "s_aux") if arguments.get(name) is not None]
    if unsupported:
        raise PackingError(f"packed attention does not support {unsupported[0]}: use packing=False for this model")
    window = arguments.get("sliding_window")
    if attention_mask is not None:  # some models pass the window only to the mask
        if attention_mask.numel() != 1:
            raise PackingError(
                f"packed attention does not support the mask of {type(module).__name__}: use packing=False for this "
                "model"
            )
        window = int(attention_mask)
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embeddings return float32 under autocast
    return attend(query, key, value, sequences, scaling=arguments.get("scaling"), window=window), None


def _mask(*arguments: Any, local_size: int | None = None, **keywords: Any) -> Tensor | None:
    """Return no mask for packed sequences, or the width of a sliding window instead of one."""
    forward = _FORWARD.get()
    if forward == "packed":
        return None if local_size is None else torch.full((1, 1, 1, 1), local_size)  # 4-D as a mask
    if forward == "padded":
        keywords["attention_mask"] = None  # ours is all true
    return sdpa_mask(*arguments, local_size=local_size, **keywords)


AttentionInterface.register(PACKED_ATTENTION, packed_attention_forward)
AttentionMaskInterface.register(PACKED_ATTENTION, _mask)
