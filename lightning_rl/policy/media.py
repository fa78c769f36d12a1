"""Pictures in the inputs of a model: its arguments by name, the positions of tokens, and placeholders that are none.

A model replaces the embeddings of placeholders by features of pictures, in the order in which both follow each other.
Rows are joined in order, so this order is that of the rows; pictures of a prompt that sequences share are in the inputs
once, as the prompt is.
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
    rows: Rollout,
    is_input: Bool[Tensor, " F"],
    place: Int[Tensor, " N"],
    size: tuple[int, int],
    *,
    own: Bool[Tensor, " N"] | None,
    borrowing: Int[Tensor, " r"],
) -> MediaInputs | None:
    """Return the pictures of rows; None without.

    Args:
        rows: Rows of the microbatch.
        is_input: True for tokens of prompts and responses, joined, that are inputs of a sequence.
        place: Index of each input among the tokens of the sequences, right-padded.
        size: Number of sequences, and of tokens of the longest one.
        own: True for inputs of packed sequences that no sequence before has; None if they are padded.
        borrowing: Rows whose prompt another row has in the inputs.
    """
    fields = rows.prompt_items, rows.response_items
    known = {name: value for each in fields for name, value in each.items()}
    if not any(int(value.counts.sum()) for each in fields for value in each.values()):
        return None
    borrows = torch.zeros(len(rows), dtype=torch.bool).index_fill(0, borrowing.cpu(), value=True)
    nothing = torch.zeros(len(rows), dtype=torch.int64)
    joined = {
        name: _join([each.get(name) or Ragged(value.values[:0], nothing) for each in fields], borrows)
        for name, value in known.items()
    }

    def spread(values: Tensor) -> Tensor:
        flat = values.masked_select(is_input)
        return flat.new_zeros(size[0] * size[1]).index_copy(0, place, flat).view(size)

    everything = torch.arange(size[0] * size[1], device=place.device).view(size)
    return MediaInputs(
        items={name: items for name, (items, _) in joined.items()},
        repeats={name: index for name, (_, index) in joined.items()},
        ids=spread(join_tokens(rows, rows.prompt_ids, rows.response_ids)),
        types={name: spread(values) for name, values in types_of(rows).items()},
        drawn=spread(join_tokens(rows, torch.zeros_like(rows.prompt_ids), rows.action_mask.long())).bool(),
        real=spread(torch.ones_like(is_input)),
        place=everything if own is None else place.masked_select(own)[None],
    )


def _join(parts: Sequence[Ragged], borrows: Bool[Tensor, " b"]) -> tuple[Shaped[Tensor, "N ..."], Int[Tensor, " M"]]:
    """Return the entries of own prompts and responses, row by row, and the index in these of the entries of all rows.

    Args:
        parts: Entries of prompts and of responses.
        borrows: True for rows whose prompt another row has.
    """
    prompts, responses = parts
    starts = torch.stack([prompts.begins, responses.begins + len(prompts.values)], 1).flatten()
    counts = torch.stack([prompts.counts, responses.counts], 1).flatten()
    own = torch.stack([prompts.counts.masked_fill(borrows, 0), responses.counts], 1).flatten()
    values, index = concatenate_items([part.values for part in parts if len(part.values)]), spans(starts, own)
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
    types = {name: values[None] for name, values in types_of(row).items() if items and takes(model, name)}
    return items_by_name(items) | types


def types_of(rows: Rollout) -> dict[str, Int[Tensor, " F"]]:
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
