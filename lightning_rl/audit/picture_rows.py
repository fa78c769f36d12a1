"""Pictures of prompts, read again from the columns of their rows without the code of the data module."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lightning_rl.data.pictures import column_pictures, is_picture
from lightning_rl.fields import concatenate_items
from lightning_rl.policy.media import NEW_AXIS, items_by_name
from lightning_rl.policy.processor import Pixels
from lightning_rl.samples import Media, Prompt, Request
from lightning_rl.samples.media import pillow_images

FEW = 4  # prompts of a data set
ROUNDING = 2  # levels of a color, where a transparent picture is put on white


def strange_pictures(prompts: Sequence[Prompt]) -> list[int]:
    """Return the indices of a few prompts whose pictures are others than those in the columns of their rows."""
    some = islice((each for each in prompts if column_pictures(each.columns)), FEW)
    return [each.index for each in some if not _has_own_pictures(each)]


def strange_outputs(prompts: Sequence[Prompt], processor: Any, text_of: Callable[[Prompt], str]) -> dict[int, str]:
    """Return the indices of a few prompts with another output than the processor makes of them alone, with its name."""
    some = islice((each for each in prompts if each.media is not None), FEW)
    return {each.index: name for each in some if (name := _other_output(each, processor, text_of(each)))}


def strange_requests(requests: Iterable[Request], processor: Any) -> dict[int, str]:
    """Return the samples of a few requests with another output than the processor makes of each picture alone."""
    some = islice((each for each in requests if each.media is not None and each.media.pictures), FEW)
    return {each.sample_id: name for each in some if (name := _strange_output(cast(Media, each.media), processor))}


def _outputs_of(processor: Any, text: str, pictures: Sequence[Pixels]) -> Mapping[str, Any]:
    images = [pillow_images(pictures)]
    return processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt")


def _strange_output(media: Media, processor: Any) -> str:
    outputs = [_outputs_of(processor, processor.image_token, [picture]) for picture in media.pictures]

    def alone(name: str) -> Tensor:
        parts = [output[name.removesuffix(NEW_AXIS)] for output in outputs]
        return concatenate_items([part[0] for part in parts] if name.endswith(NEW_AXIS) else parts)

    marks = {name: torch.cat([output[name][0] for output in outputs]) for name in media.types}
    others = [name for name, value in media.items.items() if not torch.equal(value, alone(name))]
    others += [
        name for name, value in media.types.items() if not torch.equal(value[value != 0], marks[name][marks[name] != 0])
    ]
    return others[0].removesuffix(NEW_AXIS) if others else ""


def _other_output(prompt: Prompt, processor: Any, text: str) -> str:
    media = cast(Media, prompt.media)
    output = _outputs_of(processor, text, media.pictures)
    ours = {"input_ids": torch.tensor(prompt.token_ids), **items_by_name(media.items), **media.types}
    return next((name for name, value in ours.items() if not torch.equal(value.flatten(), output[name].flatten())), "")


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
