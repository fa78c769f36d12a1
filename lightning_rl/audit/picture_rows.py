"""Pictures of prompts, read again from the columns of their rows without the code of the data module."""

import io
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import islice
from typing import Any, cast

import numpy as np
import torch

from lightning_rl.data.pictures import column_pictures, is_picture
from lightning_rl.policy.media import items_by_name
from lightning_rl.policy.processor import PictureProcessor
from lightning_rl.samples import Media, Prompt
from lightning_rl.samples.media import pillow_images

FEW = 4  # prompts of a data set
ROUNDING = 2  # levels of a color, where a transparent picture is put on white


def strange_pictures(prompts: Sequence[Prompt]) -> list[int]:
    """Return the indices of a few prompts whose pictures are others than those in the columns of their rows."""
    some = islice((each for each in prompts if column_pictures(each.columns)), FEW)
    return [each.index for each in some if not _has_own_pictures(each)]


def strange_outputs(
    prompts: Sequence[Prompt], processor: PictureProcessor, text_of: Callable[[Prompt], str]
) -> list[int]:
    """Return the indices of a few prompts with other token ids or arguments than the processor makes of them alone."""
    some = islice((each for each in prompts if each.media is not None), FEW)
    return [each.index for each in some if not _has_own_outputs(each, processor, text_of(each))]


def _has_own_outputs(prompt: Prompt, processor: PictureProcessor, text: str) -> bool:
    media = cast(Media, prompt.media)
    pictures = [pillow_images(media.pictures)]
    output = processor.processor(text=[text], images=pictures, add_special_tokens=False, return_tensors="pt")
    ours = {**items_by_name(media.items), **media.types}
    return output["input_ids"][0].tolist() == list(prompt.token_ids) and all(
        torch.equal(value.flatten(), output[name].flatten()) for name, value in ours.items()
    )


def is_same(ours: Media | None, theirs: Media | None) -> bool:
    """Return True for the same pictures with the same arguments of the model."""
    if ours is None or theirs is None or ours is theirs:
        return ours is theirs
    return (
        ours.key == theirs.key
        and ours.items.keys() == theirs.items.keys()
        and all(torch.equal(value, theirs.items[name]) for name, value in ours.items.items())
    )


def value_text(value: Any) -> str:
    """Return a text of a value of a column, in which pictures of Pillow stand for their pixels, not for their place."""
    if is_picture(value) and not isinstance(value, dict):
        return f"{value.mode} {value.size} {sha256(value.tobytes()).hexdigest()}"
    return repr([value_text(each) for each in value]) if isinstance(value, list | tuple) else repr(value)


def _has_own_pictures(prompt: Prompt) -> bool:
    found = () if prompt.media is None else prompt.media.pictures
    own = list(_read(column_pictures(prompt.columns)))
    if len(found) > len(own):  # some are in its messages
        return True
    return len(found) == len(own) and all(
        one.shape == two.shape and np.abs(one.numpy().astype(int) - two).max() <= ROUNDING
        for one, two in zip(found, own, strict=True)
    )


def _read(values: Sequence[Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the pixels of pictures in RGB, upright and on white."""
    from PIL import Image, ImageOps

    for value in values:
        held = (value.get("bytes") or value["path"]) if isinstance(value, dict) else value
        source = io.BytesIO(held) if isinstance(held, bytes) else held
        whole = source if isinstance(source, Image.Image) else Image.open(source)
        upright = ImageOps.exif_transpose(whole)
        if "A" in upright.getbands() or "transparency" in upright.info:
            upright = upright.convert("RGBA")
            white = Image.new("RGB", upright.size, "white")
            white.paste(upright, mask=upright.getchannel("A"))
            upright = white
        yield np.array(upright.convert("RGB")).astype(int)
