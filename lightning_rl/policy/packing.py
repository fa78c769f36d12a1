"""Layouts: rows of a rollout joined into model inputs without padding, and attention within each sequence.

A row is a sequence of prompt and response, or several if its environment rewrote the context: each begins with the new
context. Packed, all sequences of a microbatch form one row: linear layers run only on real tokens, and the attention
registered here (:mod:`lightning_rl.policy.attention`) runs on each sequence separately, without a block-diagonal mask.
The last token of a sequence predicts nothing and is left out.

Samples of a group have the same prompt, whose hidden states are equal by causality. Packed, it is in the inputs once,
and attention reads its keys and values with each sample.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lightning_rl.fields import first_with_items, spans
from lightning_rl.policy.attention import AUTO, PackedSequences, Shared, attend
from lightning_rl.policy.batch_invariance import INVARIANT_ATTENTION
from lightning_rl.policy.media import MediaInputs, media_inputs
from lightning_rl.rollout import EXPERT_LOAD, Rollout, context_starts, join_tokens
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

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name, with those of pictures."""
        return dict(_named_tensors("", self))

    def scatter(self, flat: Tensor) -> Tensor:
        """Scatter one value per valid token [A] into [b, T], with 0 elsewhere; differentiable."""
        return flat.new_zeros(self.shape).index_put((self.rows, self.columns), flat)


GATHERED = tuple(spec.name for spec in fields(Layout) if spec.metadata)
"""Entries of ``token_extras`` that the forward reads."""


def _named_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    parts = value._asdict() if isinstance(value, Shared) else value if isinstance(value, Mapping) else {}
    parts = {spec.name: getattr(value, spec.name) for spec in fields(value)} if is_dataclass(value) else parts
    for key, part in parts.items():
        yield from _named_tensors(f"{name}.{key}".removeprefix("."), part)


def pack(rows: Rollout, *, packed: bool = True) -> Layout:
    """Join prompt and response of every row and locate the prediction of every valid token.

    Raises:
        ValueError: If a valid token is in the padding, or begins a rewritten context.
    """
    sequences, (row, column) = sequences_of(rows), rows.valid_tokens.nonzero(as_tuple=True)
    if (outside := column >= rows.response_lengths.index_select(0, row)).any():
        first = int(outside.nonzero()[0, 0])
        raise ValueError(
            f"expected valid_tokens to be positions of responses, got position {column[first]} of row {row[first]}, "
            f"whose response has {rows.response_lengths[row[first]]} tokens: derive it from action_mask"
        )
    tokens, drawn = join_tokens(rows, rows.prompt_ids, rows.response_ids), _places(rows, row, column)
    is_input = torch.ones_like(tokens, dtype=torch.bool)
    is_input[sequences.lengths.cumsum(0) - 1] = sequences.lengths == 1  # the only token of a sequence is an input
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
        media=media_inputs(rows, is_input, place, size, own=own if packed else None, borrowing=sequences.row[borrows]),
        **{name: rows.token_extras[name][row, column] for name in GATHERED if name in rows.token_extras},
    )


def _inverse(permutation: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
    """Return the place of each index in a permutation."""
    places = torch.arange(len(permutation), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, places)


def _places(rows: Rollout, row: Int[Tensor, " A"], column: Int[Tensor, " A"]) -> Int[Tensor, " A"]:
    """Return the positions of some response tokens in the vector of all tokens."""
    first = (rows.prompt_lengths + rows.response_lengths).cumsum(0) - rows.response_lengths  # start of each response
    return first.index_select(0, row) + column


def first_with_prompt(rows: Rollout) -> Int[Tensor, " b"]:
    """Return for each row the first one of its group, if that has the same prompt and extras; otherwise itself."""
    first = (rows.groups[:, None] == rows.groups).to(torch.uint8).argmax(1)
    outside = torch.arange(rows.prompt_ids.shape[1], device=first.device) >= rows.prompt_lengths[:, None]
    alike = rows.prompt_lengths == rows.prompt_lengths[first]
    for value in rows.prompt_items.values():
        with_items = first_with_items(value.begins, value.counts).to(first.device)
        alike &= with_items == with_items[first]
    for tensor in (rows.prompt_ids, *rows.prompt_extras.values()):
        same = tensor == tensor.index_select(0, first)
        alike &= (same.flatten(2).all(-1) if same.dim() > 2 else same).logical_or_(outside).all(-1)
    return torch.where(alike, first, torch.arange(len(rows), device=first.device))


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences that the model reads: one per row, and one more for each new context.

    Row 0 with a new context at its token 9 of 14, and row 1 of 6 tokens: row [0, 0, 1], begin [0, 9, 0], lengths [9, 5,
    6]. Three samples of a prompt of 5 tokens: lender [0, 0, 0], common [0, 5, 5].

    Attributes:
        rows: Rows of the sequences.
        row: Row of each sequence.
        begin: Index of its first token, from the start of the row's prompt.
        lengths: Number of its tokens.
    """

    rows: Rollout
    row: Int[Tensor, " s"]
    begin: Int[Tensor, " s"]
    lengths: Int[Tensor, " s"]

    @cached_property
    def inputs(self) -> Int[Tensor, " s"]:
        """Number of tokens that the model reads: all but the last, which predicts nothing, and at least one."""
        return (self.lengths - 1).clamp(min=1)

    @cached_property
    def lender(self) -> Int[Tensor, " s"]:
        """Sequence that has the beginning of each one in the packed inputs, often itself."""
        begins = (self.begin == 0).nonzero()[:, 0]
        return torch.arange(len(self.row), device=self.row.device).index_put(
            (begins,), begins[first_with_prompt(self.rows)]
        )

    @cached_property
    def common(self) -> Int[Tensor, " s"]:
        """Number of tokens, of the prompt, that each sequence shares with its lender; 0 for a lender."""
        tokens = torch.minimum(torch.minimum(self.inputs, self.inputs[self.lender]), self.rows.prompt_lengths[self.row])
        return torch.where(self.lender == torch.arange(len(tokens), device=tokens.device), 0, tokens)


def sequences_of(rows: Rollout) -> Sequences:
    """Return the sequences of rows, in order.

    Raises:
        ValueError: If a valid token begins a rewritten context.
    """
    if rows.segments is None:
        lengths = rows.prompt_lengths + rows.response_lengths
        row = torch.arange(len(rows), device=lengths.device)
        return Sequences(rows, row, torch.zeros_like(row), lengths)
    starts = context_starts(rows)
    if (rows.valid_tokens & starts).any():
        raise ValueError("expected a rewritten context to begin with tokens that were read, got a sampled token")
    row, column = functional.pad(starts, (1, 0), value=True).nonzero(as_tuple=True)
    begin = torch.where(column > 0, rows.prompt_lengths[row] + column - 1, 0)
    ends = (rows.prompt_lengths + rows.response_lengths)[row]
    follows = functional.pad(row[1:] == row[:-1], (0, 1))  # by another sequence of its row
    return Sequences(rows, row, begin, torch.where(follows, begin.roll(-1), ends) - begin)


def join_sequences(
    rows: Rollout, prompt: Shaped[Tensor, "b P ..."], response: Shaped[Tensor, "b T ..."]
) -> tuple[Shaped[Tensor, "s S ..."], Bool[Tensor, "s S"]]:
    """Return a field of prompts and responses side by side, right-padded, as the model reads them, and a mask.

    The last token of a sequence is no input. The mask is True outside of padding, at least once per sequence.
    """
    sequences = sequences_of(rows)
    lengths, row = sequences.inputs, sequences.row[:, None]
    place = torch.arange(int(lengths.max()), device=lengths.device)
    position, number = sequences.begin[:, None] + place, rows.prompt_lengths[row]
    from_prompt = prompt[row, position.clamp(max=prompt.shape[1] - 1)]
    from_response = response[row, (position - number).clamp(0, response.shape[1] - 1)]
    in_prompt = (position < number).reshape(len(row), -1, *[1] * (prompt.dim() - 2))
    return torch.where(in_prompt, from_prompt, from_response), place < lengths[:, None]


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
