"""Layouts: rows of a rollout joined into model inputs without padding, and attention that keeps the sequences apart.

A row is a sequence of prompt and response, or several where its environment has rewritten the context: each begins with
what the policy read then. The tokens of a sequence are contiguous, so causality alone separates the past from the
future. Packed, all sequences of a microbatch form one row: linear layers run on real tokens only, and the attention
registered here (:mod:`lightning_rl.policy.attention`) runs on each sequence by itself, never on a block-diagonal
mask. The last token of a sequence predicts nothing and is left out.

Samples of a group begin with the same prompt, whose hidden states are the same because of causality. Packed, it is
among the inputs once for all of them, and attention alone reads it with each.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped, UInt8
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lightning_rl.policy.attention import AUTO, PackedSequences, Shared, attend
from lightning_rl.rollout import SAMPLING_MASK, Rollout, context_starts

PACKED_ATTENTION = "lightning_rl_packed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Model inputs for some rows of a rollout, and where the prediction of each valid token stands in the output.

    A token's prediction stands one position before it. With N packed positions the inputs are [1, N]; padded, they are
    [s, S], a line for each sequence, with padding on the right, which needs no attention mask because no loss is taken
    there. A prompt that several packed sequences begin with is among the inputs once.
    """

    input_ids: Int[Tensor, "R N"]
    position_ids: Int[Tensor, "R N"]
    source: Int[Tensor, " A"]  # position of the prediction in the flattened output
    targets: Int[Tensor, " A"]
    rows: Int[Tensor, " A"]
    columns: Int[Tensor, " A"]
    lengths: tuple[int, ...]  # of the packed sequences; empty when padded
    cu_seqlens: Int[Tensor, " b1"]  # cumulated lengths, int32
    shape: tuple[int, int]  # [b, T] of the rows
    shared: Shared | None = None  # None if attention reads the inputs as they stand
    sampling_mask: UInt8[Tensor, "A V8"] | None = None  # bits of the tokens that were not filtered out

    def to(self, device: torch.device | str) -> "Layout":
        """Every tensor on ``device``."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        shared = self.shared and Shared(*(index.to(device) for index in self.shared))
        return replace(self, **moved, shared=shared)

    def scatter(self, flat: Tensor) -> Tensor:
        """Spreads one value for each valid token [A] over [b, T], 0 elsewhere; the gradient comes back the same way."""
        return flat.new_zeros(self.shape).index_put((self.rows, self.columns), flat)


def pack(rows: Rollout, *, packed: bool = True) -> Layout:
    """Joins prompt and response of every row and finds the prediction of every valid token.

    Raises:
        ValueError: if a rewritten context begins with a token that is to be scored.
    """
    sequences = sequences_of(rows)
    tokens, inside = join_sequences(rows, rows.prompt_ids, rows.response_ids)
    lengths = inside.sum(-1)
    lender, borrowed = find_borrowed(rows, sequences, inside)
    shares = packed and bool(borrowed.any())
    packed = shares or (packed and bool((lengths != lengths[0]).any()))  # one length needs no padding anyway
    position = torch.arange(tokens.shape[1], device=lengths.device).expand(len(lengths), -1)
    row, column = rows.valid_tokens.nonzero(as_tuple=True)
    if (rows.valid_tokens & sequences.starts).any():
        raise ValueError("expected a rewritten context to begin with what is read, got a token there that was drawn")
    sequence = row + sequences.starts.flatten().cumsum(0)[row * rows.width + column]
    kept = inside & ~borrowed if packed else torch.ones_like(inside)
    place = kept.flatten().cumsum(0).view_as(kept) - 1  # of each token among the inputs
    place = torch.where(borrowed, place[lender], place) if shares else place
    order = lengths.argsort(descending=True, stable=True) if shares else torch.arange(len(lengths))
    return Layout(
        input_ids=tokens[kept][None] if packed else torch.where(inside, tokens, 0),
        position_ids=position[kept][None] if packed else position,
        source=place[sequence, rows.prompt_lengths[row] + column - sequences.begin[sequence] - 1],
        targets=rows.response_ids[row, column],
        rows=row,
        columns=column,
        lengths=tuple(lengths[order].tolist()) if packed else (),
        cu_seqlens=functional.pad(lengths[order].cumsum(0), (1, 0)).to(torch.int32),
        shape=(len(rows), rows.width),
        shared=_shared(place, inside, kept, order) if shares else None,
        sampling_mask=rows.token_extras[SAMPLING_MASK][row, column] if SAMPLING_MASK in rows.token_extras else None,
    )


def find_borrowed(
    rows: Rollout, sequences: "Sequences", inside: Bool[Tensor, "s S"]
) -> tuple[Int[Tensor, " s"], Bool[Tensor, "s S"]]:
    """Which tokens of each sequence need not be among packed inputs, because another sequence has them there.

    They are those of the prompt, where the first row of the group has the same, whatever comes with it included.

    Args:
        rows: of a microbatch.
        sequences: of the rows.
        inside: what of them is no padding, by :func:`join_sequences`.

    Returns:
        The sequence that stands for each, often itself, and the tokens that it stands for.
    """
    place = torch.arange(max(inside.shape[1], rows.prompt_ids.shape[1]), device=inside.device)
    prompt = place < rows.prompt_lengths[:, None]
    first = (rows.groups[:, None] == rows.groups).to(torch.uint8).argmax(1)
    alike = rows.prompt_lengths == rows.prompt_lengths[first]
    for tensor in (rows.prompt_ids, *rows.prompt_extras.values()):
        same = (tensor == tensor[first]).flatten(2).all(-1) if tensor.dim() > 2 else tensor == tensor[first]
        alike &= (same | ~prompt[:, : tensor.shape[1]]).all(-1)
    begins = (sequences.begin == 0).nonzero()[:, 0]
    lender = torch.arange(len(inside), device=inside.device)
    lender[begins] = torch.where(alike, begins[first], begins)
    borrows = (lender != torch.arange(len(inside), device=inside.device))[:, None]
    return lender, borrows & inside & inside[lender] & prompt[sequences.row, : inside.shape[1]]


def _shared(
    place: Int[Tensor, "s S"], inside: Bool[Tensor, "s S"], kept: Bool[Tensor, "s S"], order: Int[Tensor, " s"]
) -> Shared:
    """Attention's positions: whole sequences in an order, in which neighbours of one length run together."""
    position = torch.empty_like(place)
    position[order] = inside[order].flatten().cumsum(0).view_as(place) - 1
    return Shared(place[order][inside[order]], position[kept])


class Sequences(NamedTuple):
    """What the model reads at once of some rows: a row each, and one more for each context that was rewritten.

    Attributes:
        row: that each sequence is of.
        begin: its first token, counted from the begin of the row's prompt.
        lengths: its number of tokens.
        starts: where the response of a row goes on with the next sequence.
    """

    row: Int[Tensor, " s"]
    begin: Int[Tensor, " s"]
    lengths: Int[Tensor, " s"]
    starts: Bool[Tensor, "b T"]


def sequences_of(rows: Rollout) -> Sequences:
    """The sequences of rows, in their order."""
    starts = context_starts(rows)
    row, column = functional.pad(starts, (1, 0), value=True).nonzero(as_tuple=True)
    begin = torch.where(column > 0, rows.prompt_lengths[row] + column - 1, 0)
    ends = (rows.prompt_lengths + rows.response_lengths)[row]
    follows = functional.pad(row[1:] == row[:-1], (0, 1))  # by another sequence of its row
    return Sequences(row, begin, torch.where(follows, begin.roll(-1), ends) - begin, starts)


def join_sequences(
    rows: Rollout, prompt: Shaped[Tensor, "b P ..."], response: Shaped[Tensor, "b T ..."]
) -> tuple[Shaped[Tensor, "s S ..."], Bool[Tensor, "s S"]]:
    """A field of the prompts and the same of the responses side by side, as the model reads them, padded on the right.

    The last token of a sequence is not among its inputs. The second result says what is no padding, at least one place
    in each sequence.
    """
    sequences = sequences_of(rows)
    lengths, row = (sequences.lengths - 1).clamp(min=1), sequences.row[:, None]
    place = torch.arange(int(lengths.max()), device=lengths.device)
    position, number = sequences.begin[:, None] + place, rows.prompt_lengths[row]
    from_prompt = prompt[row, position.clamp(max=prompt.shape[1] - 1)]
    from_response = response[row, (position - number).clamp(0, response.shape[1] - 1)]
    in_prompt = (position < number).reshape(len(row), -1, *[1] * (prompt.dim() - 2))
    return torch.where(in_prompt, from_prompt, from_response), place < lengths[:, None]


_FORWARD: ContextVar[str | None] = ContextVar("forward", default=None)  # "packed" or "padded", within our own


@contextmanager
def packed_attention(
    layout: Layout, *, implementation: str | None = PACKED_ATTENTION, attention: str = AUTO
) -> Iterator[dict[str, Any]]:
    """Yields the keyword arguments that carry the sequence boundaries through the model to its attention.

    Arguments and not a global, because activation checkpointing runs the attention again in the backward, long after
    this context has ended. Only the mask, which is built once and outside of the layers, is switched by the context.

    Args:
        layout: of the microbatch.
        implementation: of the model's attention. Ours is given a mask that says nothing: without one transformers looks
            for sequences in the positions, and every microbatch waits for an accelerator's answer.
        attention: the kernel that sequences attend in.
    """
    token = _FORWARD.set("packed" if layout.lengths else "padded")
    masked = implementation == PACKED_ATTENTION
    arguments: dict[str, Any] = (
        {"attention_mask": torch.ones_like(layout.input_ids, dtype=torch.bool)} if masked else {}
    )
    if layout.lengths:
        sequences = PackedSequences(layout.lengths, layout.cu_seqlens, attention, layout.shared)
        arguments["packed_sequences"] = sequences
    try:
        yield arguments
    finally:
        _FORWARD.reset(token)


def packed_attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers calls it in each layer: packed sequences by themselves, all else as sdpa.

    Raises:
        ValueError: if a model drops the boundaries, or asks for what packed attention does not know.
    """
    sequences: PackedSequences | None = arguments.pop("packed_sequences", None)
    if sequences is None:
        if _FORWARD.get() == "packed":
            raise ValueError(f"{type(module).__name__} drops the sequence boundaries: use packing=False for this model")
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    unsupported = [name for name in ("softcap", "s_aux") if arguments.get(name) is not None]
    if unsupported:
        raise ValueError(f"packed attention does not know {unsupported[0]}: use packing=False for this model")
    window = arguments.get("sliding_window")
    if attention_mask is not None:  # some models tell the window to the mask alone
        window = int(attention_mask)
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embeddings leave float32 under autocast
    return attend(query, key, value, sequences, scaling=arguments.get("scaling"), window=window), None


def _mask(*arguments: Any, local_size: int | None = None, **keywords: Any) -> Tensor | None:
    """No mask for packed sequences, but the width of a sliding window in place of one, which is all it would say."""
    forward = _FORWARD.get()
    if forward == "packed":
        return None if local_size is None else torch.tensor(local_size)
    if forward == "padded":
        keywords["attention_mask"] = None  # ours, which says nothing
    return sdpa_mask(*arguments, local_size=local_size, **keywords)


AttentionInterface.register(PACKED_ATTENTION, packed_attention_forward)
AttentionMaskInterface.register(PACKED_ATTENTION, _mask)
