"""Media: pictures among the tokens of a prompt or of a reply, and the tensors that a model reads for them."""

import base64
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped, UInt8
from torch import Tensor

from lightning_rl.fields import concatenate_items

SHOWN = 160  # pixels


@dataclass(frozen=True, eq=False)
class Media:
    """Pictures among some tokens: 2 pictures, 8 ids for the engine, ``pixel_values`` [40, 1176] and grids [2, 3].

    Tokens hold as many placeholders as the model needs for each picture; engines make these of a single one.

    Args:
        engine_ids: Token ids with the placeholder of each picture as the chat template writes it.
        pictures: Pixels of each picture in RGB, in the order of the placeholders.
        items: Arguments of the model that have entries for pictures, or for their patches, along the first axis.
        types: Arguments of the model that have one entry for each token, such as its modality.
        drawn: True for tokens that the policy sampled, among which none is a placeholder.
    """

    engine_ids: tuple[int, ...]
    pictures: tuple[UInt8[Tensor, "H W 3"], ...]
    items: Mapping[str, Shaped[Tensor, "N ..."]]
    types: Mapping[str, Int[Tensor, " L"]]
    drawn: Bool[Tensor, " L"] = field(repr=False)

    @classmethod
    def of_text(cls, token_ids: Sequence[int], *, drawn: bool = False) -> "Media":
        """Return the media of tokens without a picture."""
        return cls(tuple(token_ids), (), {}, {}, torch.full((len(token_ids),), drawn))

    @cached_property
    def key(self) -> int:
        """Hash of the pictures, of 62 bits, by which prompts of the same token ids differ."""
        digest = hashlib.sha256()
        for picture in self.pictures:
            digest.update(f"{list(picture.shape)}".encode() + picture.numpy().tobytes())
        return int.from_bytes(digest.digest()[:8], "big") >> 2

    @cached_property
    def data_urls(self) -> tuple[str, ...]:
        """Pictures as PNG files in URLs, for servers; no pixel changes."""
        return tuple(_data_url(picture, "PNG") for picture in pillow_images(self.pictures))

    @cached_property
    def thumbnails(self) -> tuple[str, ...]:
        """Pictures of at most :data:`SHOWN` pixels a side as JPEG files in URLs, for reports."""
        images = pillow_images(self.pictures)
        for image in images:
            image.thumbnail((SHOWN, SHOWN))
        return tuple(_data_url(image, "JPEG") for image in images)

    def state(self) -> dict[str, Any]:
        """Return tensors and containers of tensors, from which :meth:`of_state` makes equal media."""
        ids = torch.tensor(self.engine_ids, dtype=torch.int64)
        return {**{each.name: getattr(self, each.name) for each in fields(self)}, "engine_ids": ids}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Media":
        """Invert :meth:`state`."""
        ids, pictures = tuple(state["engine_ids"].tolist()), tuple(state["pictures"])
        parts: dict[str, Any] = {"engine_ids": ids, "pictures": pictures}
        return cls(**{**state, **parts})


def _data_url(image: Any, kind: str) -> str:
    with io.BytesIO() as file:
        image.save(file, kind)
        return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def pillow_images(pictures: Iterable[UInt8[Tensor, "H W 3"]]) -> list[Any]:
    """Return pictures as those of Pillow."""
    from PIL import Image

    return [Image.fromarray(np.ascontiguousarray(picture.numpy())) for picture in pictures]


def join_media(parts: Iterable[Media]) -> Media:
    """Return the media of tokens that follow one another."""
    parts = list(parts)
    names = dict.fromkeys(name for part in parts for name in part.types)
    return Media(
        engine_ids=tuple(token for part in parts for token in part.engine_ids),
        pictures=tuple(picture for part in parts for picture in part.pictures),
        items=join_items([part.items for part in parts]),
        types={
            name: torch.cat([part.types.get(name, torch.zeros(len(part.drawn), dtype=torch.int64)) for part in parts])
            for name in names
        },
        drawn=torch.cat([part.drawn for part in parts]),
    )


def join_items(parts: Iterable[Mapping[str, Shaped[Tensor, "N ..."]]]) -> dict[str, Shaped[Tensor, "N ..."]]:
    """Concatenate arguments of a model along the axis of pictures; smaller ones are padded with 0 behind.

    Models of tiles of different numbers or sizes know their padding from another argument.
    """
    parts = list(parts)
    return {
        name: concatenate_items([part[name] for part in parts if name in part])
        for name in dict.fromkeys(name for part in parts for name in part)
    }
