"""Sequences: the branches of rows, in each of which the model reads the tokens from a root to a leaf."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from lightning_rl.fields import first_with_items, spans
from lightning_rl.rollout import Rollout, join_tokens, tree_of


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
    """Sequences that the model reads: one for each branch of a row.

    Row 0 with a new context at its token 9 of 14, and row 1 of 6 tokens: row [0, 0, 1], lengths [9, 5, 6]. Three
    samples of a prompt of 5 tokens: lender [0, 0, 0], common [0, 5, 5].

    A node is the prompt of a row or one of its segments; the nodes of a row follow each other, the prompt first.

    Attributes:
        rows: Rows of the sequences.
        row: Row of each sequence.
        lengths: Number of its tokens.
        with_prompt: True if it begins with the prompt of its row.
        nodes: Nodes of the sequences, from root to leaf, one sequence after the other.
        places: Index of each token of the sequences among the tokens of prompts and responses, joined; None if
            sequences are slices of rows, in order.
    """

    rows: Rollout
    row: Int[Tensor, " s"]
    lengths: Int[Tensor, " s"]
    with_prompt: Bool[Tensor, " s"]
    nodes: Int[Tensor, " n"]
    places: Int[Tensor, " G"] | None = None

    def gather(self, values: Shaped[Tensor, "F ..."]) -> Shaped[Tensor, "G ..."]:
        """Return the value of each token of the sequences, given those of the tokens of rows."""
        return values if self.places is None else values.index_select(0, self.places)

    def first(self, tokens: Int[Tensor, " A"]) -> Int[Tensor, " A"]:
        """Return the first index among the tokens of the sequences, given indices of tokens of rows."""
        if self.places is None:
            return tokens
        size = int((self.rows.prompt_lengths + self.rows.response_lengths).sum())
        index = torch.arange(len(self.places), device=tokens.device)
        return index.new_full((size,), len(index)).scatter_reduce(0, self.places, index, "amin").index_select(0, tokens)

    def find(self, row: Int[Tensor, " A"], column: Int[Tensor, " A"]) -> Int[Tensor, " A"]:
        """Return the index among the tokens of the sequences at which each token of a response is predicted."""
        ends = (self.rows.prompt_lengths + self.rows.response_lengths).cumsum(0)
        return self.first((ends - self.rows.response_lengths).index_select(0, row) + column)

    @cached_property
    def line(self) -> Int[Tensor, " G"]:
        """Sequence of each token."""
        return torch.arange(len(self.row), device=self.row.device).repeat_interleave(self.lengths)

    @cached_property
    def numbers(self) -> Int[Tensor, " s"]:
        """Number of each sequence within its row, from 0."""
        counts = self.row.bincount(minlength=len(self.rows))
        return torch.arange(len(self.row), device=self.row.device) - (counts.cumsum(0) - counts)[self.row]

    @cached_property
    def inputs(self) -> Int[Tensor, " s"]:
        """Number of tokens that the model reads: all but the last, which predicts nothing, and at least one."""
        return (self.lengths - 1).clamp(min=1)

    @cached_property
    def head(self) -> Int[Tensor, " s"]:
        """First sequence that begins with the prompt of its row, for each sequence with a prompt; otherwise itself."""
        return self._first_of(self.row)

    def _first_of(self, kind: Int[Tensor, " s"]) -> Int[Tensor, " s"]:
        """Return the first sequence with a prompt of the same kind for each one with a prompt; otherwise itself."""
        every = torch.arange(len(kind), device=kind.device)
        found = self.with_prompt.nonzero()[:, 0]
        first = every.new_zeros(len(self.rows)).scatter_reduce(0, kind[found], found, "amin", include_self=False)
        return torch.where(self.with_prompt, first[kind], every)

    @cached_property
    def lender(self) -> Int[Tensor, " s"]:
        """Sequence that has the beginning of each one in the packed inputs, often itself."""
        return self._first_of(first_with_prompt(self.rows)[self.row])

    @cached_property
    def common(self) -> Int[Tensor, " s"]:
        """Number of tokens, of the prompt, that each sequence shares with its lender; 0 for a lender."""
        tokens = torch.minimum(torch.minimum(self.inputs, self.inputs[self.lender]), self.rows.prompt_lengths[self.row])
        return torch.where(self.lender == torch.arange(len(tokens), device=tokens.device), 0, tokens)


def sequences_of(rows: Rollout, chosen: Bool[Tensor, " s"] | None = None) -> Sequences:
    """Return the sequences of rows, in order: those of a row in the order of their leaves.

    Args:
        rows: Rows.
        chosen: True for those to return; None for all.
    """
    lengths = rows.prompt_lengths + rows.response_lengths
    every = torch.arange(len(rows), device=lengths.device)
    if rows.segments is None:
        nodes = torch.arange(2 * len(rows), device=lengths.device)
        return Sequences(rows, every, lengths, torch.ones_like(every, dtype=torch.bool), nodes)
    tree = tree_of(rows)
    roots, nodes = (tree.parents < 0).nonzero()[:, 0], torch.arange(len(tree.row), device=lengths.device)
    sizes = torch.diff(tree.starts[roots], append=lengths.sum(0, keepdim=True))
    forks = (tree.parents >= 0) & (tree.parents != nodes - 1)
    if chosen is None and bool((sizes > 0).all() & ~forks.any()):  # slices
        return Sequences(rows, tree.row[roots], sizes, tree.is_prompt[roots], nodes)
    is_leaf = torch.ones_like(tree.parents, dtype=torch.bool).index_fill(
        0, tree.parents[tree.parents >= 0], value=False
    )
    levels = [is_leaf.nonzero()[:, 0]]
    while bool(((above := torch.where(levels[-1] < 0, -1, tree.parents[levels[-1]])) >= 0).any()):
        levels.append(above)
    paths = torch.stack(levels[::-1], 1)
    inside = paths >= 0
    lengths = torch.where(inside, tree.lengths[paths], 0).sum(1)
    kept = lengths > 0
    if chosen is not None:
        kept[kept.nonzero()[:, 0]] = chosen
    paths, inside, leaves, lengths = paths[kept], inside[kept], levels[0][kept], lengths[kept]
    nodes = paths.masked_select(inside)
    roots = paths.gather(1, inside.long().argmax(1)[:, None])[:, 0]
    places = spans(tree.starts[nodes], tree.lengths[nodes])
    return Sequences(rows, tree.row[leaves], lengths, tree.is_prompt[roots], nodes, places)


def join_sequences(
    rows: Rollout, prompt: Shaped[Tensor, "b P ..."], response: Shaped[Tensor, "b T ..."]
) -> tuple[Shaped[Tensor, "s S ..."], Bool[Tensor, "s S"]]:
    """Return a field of prompts and responses side by side, right-padded with 0, as the model reads them, and a mask.

    The last token of a sequence is no input. The mask is True outside of padding, at least once per sequence.
    """
    sequences, tokens = sequences_of(rows), join_tokens(rows, prompt, response)
    ends, inputs = sequences.lengths.cumsum(0), sequences.inputs
    inside = torch.arange(int(inputs.max()), device=inputs.device) < inputs[:, None]
    padded = tokens.new_zeros(*inside.shape, *tokens.shape[1:])
    padded[inside] = sequences.gather(tokens).index_select(0, spans(ends - sequences.lengths, inputs))
    return padded, inside
