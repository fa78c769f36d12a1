"""Pictures in the inputs of a model: its arguments by name, the positions of tokens, and placeholders that are none.

A model replaces the embeddings of placeholders by features of pictures, in the order in which both follow each other.
Sequences are joined in order, so this order is theirs. Pictures of a prompt that sequences share are in the inputs
once, as the prompt is; those of another part that branches share are in the inputs of each.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lightning_rl.fields import Ragged, concatenate_items, spans
from lightning_rl.policy.sequences import Sequences
from lightning_rl.rollout import Rollout, join_tokens
from lightning_rl.samples import Media
from lightning_rl.samples.media import join_items, join_media
from lightning_rl.utils.device import to_device

NEW_AXIS = "[None]"  # suffix of arguments of the model that get a further first axis
PLACEHOLDER = re.compile(r"(image|video|audio)_token_(id|index)")  # names in configurations


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaInputs:
    """Pictures of a microbatch: pixels and grids of 3 pictures, and its 2 sequences of at most 20 tokens.

    Args:
        items: Arguments of the model with entries for pictures, each picture once.
        repeats: Indices of the entries of all sequences among ``items``, in order.
        ids: Token ids of the sequences, right-padded.
        types: Arguments of the model with one entry for each token of the sequences.
        drawn: True for tokens that the policy sampled.
        real: True outside of padding.
        place: Index of each input of the model among the tokens of the sequences, in the shape of the inputs.
    """

    items: Mapping[str, Shaped[Tensor, "N ..."]]
    repeats: Mapping[str, Int[Tensor, " M"]]
    ids: Int[Tensor, "s S"]
    types: Mapping[str, Int[Tensor, "s S"]]
    drawn: Bool[Tensor, "s S"]
    real: Bool[Tensor, "s S"]
    place: Int[Tensor, "R N"]

    def to(self, device: torch.device | str) -> "MediaInputs":
        """Move every tensor to ``device``."""
        moved: dict[str, Any] = {
            name: {key: to_device(value, device) for key, value in getattr(self, name).items()}
            for name in ("items", "repeats", "types")
        }
        moved |= {name: to_device(getattr(self, name), device) for name in ("ids", "drawn", "real", "place")}
        return replace(self, **moved)


def media_inputs(
    sequences: Sequences,
    is_input: Bool[Tensor, " G"],
    place: Int[Tensor, " N"],
    size: tuple[int, int],
    *,
    own: Bool[Tensor, " N"] | None,
    borrows: Bool[Tensor, " s"],
) -> MediaInputs | None:
    """Return the pictures of sequences; None without.

    Args:
        sequences: Sequences of the microbatch.
        is_input: True for tokens of the sequences that are inputs.
        place: Index of each input among the tokens of the sequences, right-padded.
        size: Number of sequences, and of tokens of the longest one.
        own: True for inputs of packed sequences that no sequence before has; None if they are padded.
        borrows: True for sequences whose prompt another one has in the inputs.
    """
    rows = sequences.rows
    fields = rows.prompt_items, rows.response_items
    names = dict.fromkeys(name for each in fields for name in each)
    if not any(int(value.counts.sum()) for each in fields for value in each.values()):
        return None
    joined = {name: _join(name, sequences, borrows.cpu()) for name in names}

    def spread(values: Tensor) -> Tensor:
        flat = sequences.gather(values).masked_select(is_input)
        return flat.new_zeros(size[0] * size[1]).index_copy(0, place, flat).view(size)

    everything = torch.arange(size[0] * size[1], device=place.device).view(size)
    return MediaInputs(
        items={name: items for name, (items, _) in joined.items()},
        repeats={name: index for name, (_, index) in joined.items()},
        ids=spread(join_tokens(rows, rows.prompt_ids, rows.response_ids)),
        types={name: spread(values) for name, values in _types_of(rows).items()},
        drawn=spread(join_tokens(rows, torch.zeros_like(rows.prompt_ids), rows.action_mask.long())).bool(),
        real=torch.zeros(size[0] * size[1], dtype=torch.bool, device=place.device)
        .index_fill(0, place, value=True)
        .view(size),
        place=everything if own is None else place.masked_select(own)[None],
    )


def _join(
    name: str, sequences: Sequences, borrows: Bool[Tensor, " s"]
) -> tuple[Shaped[Tensor, "N ..."], Int[Tensor, " M"]]:
    """Return the entries of an argument in the inputs, in order, and the index in these of those of all sequences."""
    rows = sequences.rows
    empty = Ragged(torch.zeros(0, dtype=torch.int64), torch.zeros(len(rows), dtype=torch.int64))
    prompts, responses = (each.get(name, empty) for each in (rows.prompt_items, rows.response_items))
    known = rows.segment_items.get(name, empty)
    segments = torch.ones(len(rows), dtype=torch.int64) if rows.segments is None else rows.segments.counts
    row = torch.arange(len(rows)).repeat_interleave(segments + 1)  # of each node
    heads = (segments + 1).cumsum(0) - segments - 1
    counts, is_prompt = torch.zeros_like(row), torch.zeros_like(row, dtype=torch.bool)
    is_prompt[heads] = True
    counts[~is_prompt & (known.counts > 0)[row]] = known.values.cpu()
    bare = (known.counts == 0) & (responses.counts > 0)
    counts[heads[bare] + 1] = responses.counts[bare]  # of a row in one context, or of an older recording
    before = counts.cumsum(0) - counts
    starts = (responses.begins + len(prompts.values) - before[heads])[row] + before
    starts[heads], counts[heads] = prompts.begins, prompts.counts
    nodes = sequences.nodes.cpu()
    starts, counts, is_prompt = starts[nodes], counts[nodes], is_prompt[nodes]
    own = counts.clone()
    own[is_prompt] = counts[is_prompt].masked_fill(borrows[sequences.with_prompt.cpu()], 0)
    values = concatenate_items([part.values for part in (prompts, responses) if len(part.values)])
    index = spans(starts, own)
    place = torch.empty(len(values), dtype=torch.int64)
    place[index.flip(0)] = torch.arange(len(index)).flip(0)  # the first one, where a picture is in the inputs twice
    return values.index_select(0, index.to(values.device)), place[spans(starts, counts)]


def media_of_prompts(
    parts: Sequence[Media | None], ids: Int[Tensor, "B L"], real: Bool[Tensor, "B L"]
) -> MediaInputs | None:
    """Return the pictures of prompts that are padded on the left; None without.

    Args:
        parts: Media of each prompt.
        ids: Token ids.
        real: True outside of padding.
    """
    if all(media is None or not media.pictures for media in parts):
        return None
    whole = [
        media or Media.of_text([0] * int(length), drawn=True)  # its placeholders, if any, stand for no picture
        for media, length in zip(parts, real.sum(1), strict=True)
    ]
    joined = join_media(whole)

    def spread(values: Tensor) -> Tensor:
        return torch.zeros_like(ids).masked_scatter_(real, values.to(ids))

    return MediaInputs(
        items=joined.items,
        repeats={name: torch.arange(len(values)) for name, values in joined.items.items()},
        ids=ids,
        types={name: spread(values) for name, values in joined.types.items()},
        drawn=spread(joined.drawn).bool(),
        real=real,
        place=torch.arange(ids.numel(), device=ids.device).view(ids.shape),
    ).to(ids.device)


def media_arguments(model: nn.Module, media: MediaInputs, positions: Int[Tensor, "R N"]) -> dict[str, Tensor]:
    """Return the arguments of a multimodal model for pictures, with the positions of tokens as the model counts them.

    Args:
        model: Model with its towers, without its vocabulary head.
        media: Pictures.
        positions: Positions of the inputs in their sequences.
    """
    accepted = inspect.signature(type(model).forward).parameters
    given = items_by_name(media.items)
    given |= {name: values.flatten()[media.place] for name, values in media.types.items() if name in accepted}
    function: Any = getattr(model, "get_rope_index", None)
    if function is not None:
        wanted = inspect.signature(function).parameters
        sequences = {**media.types, "input_ids": media.ids, "attention_mask": media.real.long()}
        grids = {name: values[media.repeats[name]] for name, values in media.items.items() if name in wanted}
        found, _ = function(**grids, **{name: value for name, value in sequences.items() if name in wanted})
        given["position_ids"] = found.flatten(1)[:, media.place]
    else:
        given["position_ids"] = positions
    return given


def own_arguments(model: nn.Module, row: Rollout) -> dict[str, Tensor]:
    """Return the arguments of a model's own forward for the pictures of one row in one context; empty without."""
    fields = row.prompt_items, row.response_items
    items = join_items({name: part.values for name, part in each.items() if len(part.values)} for each in fields)
    types = {name: values[None] for name, values in _types_of(row).items() if items and takes(model, name)}
    return items_by_name(items) | types


def _types_of(rows: Rollout) -> dict[str, Int[Tensor, " F"]]:
    """Return the arguments of a model with one entry for each token of prompts and responses, joined."""
    prompt, response = torch.zeros_like(rows.prompt_ids), torch.zeros_like(rows.response_ids)
    return {
        name: join_tokens(rows, rows.prompt_types.get(name, prompt), rows.response_types.get(name, response))
        for name in {**rows.prompt_types, **rows.response_types}
    }


def takes(model: nn.Module, name: str) -> bool:
    """Return True if the forward of a model has an argument of this name."""
    return name in inspect.signature(type(model).forward).parameters


def items_by_name(items: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return arguments of a model under its names for them."""
    return {
        name.removesuffix(NEW_AXIS): value[None] if name.endswith(NEW_AXIS) else value for name, value in items.items()
    }


def placeholders_of(config: PreTrainedConfig) -> list[int]:
    """Return the token ids that stand for pictures or sound in the inputs of a model."""
    return sorted(
        {value for name, value in vars(config).items() if PLACEHOLDER.fullmatch(name) and isinstance(value, int)}
    )


@contextmanager
def plain_placeholders(
    model: PreTrainedModel, ids: Int[Tensor, "R N"], drawn: Bool[Tensor, "R N"]
) -> Iterator[Int[Tensor, "R N"]]:
    """Yield token ids in which sampled placeholders are other tokens, whose embeddings are those of the placeholders.

    A model would search a picture for each of them.

    Args:
        model: Multimodal model.
        ids: Token ids of the inputs.
        drawn: True for sampled tokens.
    """
    special = placeholders_of(model.config)
    if not special or not bool((found := drawn & torch.isin(ids, torch.tensor(special, device=ids.device))).any()):
        yield ids
        return
    embedding: Any = model.get_input_embeddings()
    stand_in = next(token for token in range(len(special) + 1) if token not in special)

    def restore(_: Any, __: Any, output: Tensor) -> Tensor:
        true = type(embedding).forward(embedding, ids[found])
        return output.masked_scatter(found[..., None], true) if output.shape[:-1] == ids.shape else output

    handle = embedding.register_forward_hook(restore)
    try:
        yield ids.masked_fill(found, stand_in)
    finally:
        handle.remove()
