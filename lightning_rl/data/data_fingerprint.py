"""Hash of a data set, the same in every process."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_rl.data.encoding import Encoder
from lightning_rl.data.row_schema import PromptForm, Reading, without_none

SAMPLED = 20_000  # rows


def fingerprint_of(
    read: Callable[[Sequence[int]], list[Reading]], length: int, form: PromptForm, encoder: Encoder
) -> str:
    """Return the first 16 digits of the SHA-256 over token ids and columns of rows in canonical JSON.

    Without a tokenizer, prompts that are no token ids are hashed as they are, with the chat template variables.
    """
    encodes = encoder.tokenizer is not None
    digest = hashlib.sha256(canonical_json([length, None if encodes else form.chat_template_kwargs]))
    count = min(length, SAMPLED)
    for start in range(0, count, 1024):
        numbers = [position * length // count for position in range(start, min(start + 1024, count))]
        readings = read(numbers)
        prompts = encoder.prompts(readings) if encodes else [None] * len(readings)
        for prompt, reading in zip(prompts, readings, strict=True):
            content = reading.content if prompt is None else prompt.token_ids
            digest.update(canonical_json([content, without_none(reading.columns)]))
            if prompt is not None and prompt.media is not None:
                digest.update(canonical_json(prompt.media.key))
    return digest.hexdigest()[:16]


def canonical_json(value: Any) -> bytes:
    """Encode a value as JSON with sorted keys; other types as their ``repr`` unless it holds a memory address.

    Example:
        >>> canonical_json({"b": (1, 2), "a": {"c"}})
        b'{"a":{"set":["c"]},"b":[1,2]}'
    """
    try:
        return _dump(value)
    except TypeError:  # keys that are not strings
        return _dump(_with_text_keys(value))


def _dump(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain).encode()


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {repr(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    kind = type(value).__name__
    if isinstance(value, set | frozenset):
        return {kind: sorted(value, key=repr)}
    if isinstance(value, bytes | bytearray):
        return {kind: value.hex()}
    if hasattr(value, "isoformat"):
        return {kind: value.isoformat()}
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        return {kind: value.tolist()}
    if isinstance(value, Mapping):
        return dict(value)
    text = repr(value)
    return {kind: None if " at 0x" in text else text}
