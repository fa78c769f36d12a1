"""Pictures of rows and messages: their forms, their places in the text, and their pixels."""

import base64
import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_rl.policy.processor import PART, Pixels

COLUMNS = ("images", "image")  # of TRL and of verl
TAG = re.compile(r"<image>")  # place of a picture in the text of a row, as verl writes it
PARTS = ("image", "image_url")  # types of parts of a message, as chat templates and OpenAI write them
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")  # of PIL, which become RGB without loss
MAX_PIXELS = 2**26
MAX_PATH = 4096  # letters
DATA_URL = re.compile(r"data:image/[a-z+]+;base64,")
INSTALL = "pip install lightning-rl[images]"


def column_pictures(columns: Mapping[str, Any]) -> list[Any]:
    """Return the pictures in the column ``images`` or ``image``, in order; an empty text is none.

    Raises:
        ValueError: If there are some in both.
    """
    values = [columns.get(name) for name in COLUMNS]
    found = [[*each] if isinstance(each, list | tuple) else [] if each in (None, "") else [each] for each in values]
    if all(found):
        raise ValueError(f"expected pictures in one of the columns {' and '.join(COLUMNS)}, got both: leave one out")
    return [*found[0], *found[1]]


def is_picture(value: Any) -> bool:
    """Return True for a picture of Pillow, or a mapping of a data set with the bytes of one."""
    return type(value).__module__.startswith("PIL.") or (isinstance(value, Mapping) and value.get("bytes") is not None)


def place_pictures(
    messages: Sequence[Mapping[str, Any]], pictures: Sequence[Any], name: str
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return messages whose pictures are parts ``{"type": "image"}``, and the pictures in the order of these.

    A part holds its picture, or stands for the next one of the row. In a row without such parts, ``<image>`` in a text
    stands for the next picture; in one without these either, all pictures precede the text of the first message of the
    user.

    Args:
        messages: Messages; the content of each is a text or a list of parts.
        pictures: Pictures of the row's columns.
        name: Name of the row in errors.

    Raises:
        ValueError: If the numbers of pictures and of places differ.
    """
    if any(value is None for value in pictures):
        raise ValueError(f"expected a picture for each entry of the columns of {name}, got None: leave it out")
    rest, found, placed, own = list(pictures), list[Any](), list[dict[str, Any]](), 0
    tagged = bool(pictures) and not any(_is_place(part) for message in messages for part in _parts(message))
    for message in messages:
        parts = [piece for part in _parts(message) for piece in (_split(part) if tagged else [part])]
        for number, part in enumerate(parts):
            if _is_place(part):
                value = picture_in(part)
                own += value is not None
                found.append(value if value is not None or not rest else rest.pop(0))
                parts[number] = dict(PART)
        has_place = any(map(_is_place, parts))
        placed.append({**message, "content": parts} if has_place else dict(message))
    if tagged and not found:
        first = next((each for each in placed if each.get("role") == "user"), None)
        if first is not None:
            first["content"] = [*(dict(PART) for _ in rest), *_parts(first)]
            found, rest = rest, []
    if rest or any(value is None for value in found):
        raise ValueError(
            f"expected a picture for each place of one in {name}, got {len(pictures)} in the columns "
            f"{' and '.join(COLUMNS)} for {len(found) - own} places: write <image>, or a part of type image, once for "
            "each"
        )
    return placed, found


def picture_in(part: Mapping[str, Any]) -> Any:
    """Return the picture of a part of a message; None if it stands for the next picture of its row."""
    return next((part[key] for key in (*PARTS, "path", "url") if part.get(key) is not None), None)


def has_open_place(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a part of a message stands for a picture that the messages do not have."""
    parts = (part for message in messages for part in _parts(message) if _is_place(part))
    return any(picture_in(part) is None for part in parts)


def _is_place(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in PARTS


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())


def _split(part: Any) -> list[Any]:
    """Split a part of text at the tags of pictures."""
    texts = TAG.split(part["text"]) if isinstance(part, Mapping) and isinstance(part.get("text"), str) else []
    if len(texts) < 2:
        return [part]
    pieces = [piece for text in texts for piece in ({"type": "text", "text": text}, dict(PART))][:-1]
    return [piece for piece in pieces if piece.get("text") != ""]


def pixels_of(value: Any, name: str) -> Pixels:
    """Return the pixels of a picture, upright, in RGB; transparent ones on white.

    Args:
        value: Picture of PIL, bytes of a file, path of a file, or a mapping of a data set with ``bytes`` or ``path``.
        name: Name of the picture in errors.

    Raises:
        ImportError: If Pillow is missing.
        ValueError: If it is no picture, cannot be read whole, moves, is too large, or has colors for print.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ImportError(f"expected Pillow, which reads pictures: {INSTALL}") from error
    opened = source = _source(value, name)
    try:
        if not isinstance(source, Image.Image):
            opened = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    except (UnidentifiedImageError, Image.DecompressionBombError) as error:
        vector = (isinstance(source, bytes) and b"<svg" in source[:4096]) or str(source).endswith(".svg")
        drawn = "a drawing in SVG: convert it to PNG" if vector else f"{_description(value)}: {error}"
        raise ValueError(f"expected {name} to be a picture that Pillow reads, got {drawn}") from error
    _check(opened, name)
    try:
        upright = ImageOps.exif_transpose(opened)
        if upright.mode in ("LA", "PA", "RGBA") or "transparency" in upright.info:
            above = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above)
        array = np.array(upright.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"expected {name} to be a whole picture, got {_description(value)}: {error}") from error
    return torch.from_numpy(array)


def _check(picture: Any, name: str) -> None:
    if getattr(picture, "n_frames", 1) > 1:
        raise ValueError(f"expected {name} to be one picture, got one of {picture.n_frames} frames: save one frame")
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise ValueError(f"expected {name} of at most {MAX_PIXELS} pixels, got {width} x {height}: make it smaller")
    if picture.mode not in MODES:
        cure = 'convert it, as picture.convert("RGB")'
        if picture.mode.startswith(("I", "F")):  # which Pillow would cut off at 255
            cure = "scale its values to 0 to 255, and save 8 bits"
        raise ValueError(f"expected {name} in RGB, got the mode {picture.mode} of Pillow: {cure}")


def _source(value: Any, name: str) -> Any:
    """Return a picture of PIL, the bytes of a file, or a path that exists."""
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("bytes", "path", "url", *PARTS) if value.get(key) is not None), value)
        value = value.get("url", value) if isinstance(value, Mapping) else value
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        if data := DATA_URL.match(text):
            return base64.b64decode(text[data.end() :])
        if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:", text):
            raise ValueError(
                f"expected {name} to be a file, bytes or a picture of Pillow, got the address {text:.80}: download it "
                "first, since a run does not depend on what an address returns"
            )
        if len(text) > MAX_PATH or not Path(text).is_file():
            raise ValueError(f"expected {name} to be a file that exists, got {text:.200}")
        return text
    if type(value).__module__.partition(".")[0] != "PIL":
        raise ValueError(f"expected {name} to be a file, bytes or a picture of Pillow, got {_description(value)}")
    return value


def _description(value: Any) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes | bytearray) else f"{value!r:.100}"
