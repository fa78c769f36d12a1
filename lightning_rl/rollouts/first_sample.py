"""Prompt and response of a sample as texts with their control tokens, as the policy reads and writes them."""

from collections.abc import Iterator, Sequence
from itertools import chain

from transformers import PreTrainedTokenizerBase

from lightning_rl.samples import Media, Trajectory
from lightning_rl.utils.terminal import visible

MAX_CHARACTERS = 600


def first_sample(samples: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase | None) -> Iterator[tuple[str, str]]:
    """Yield ``prompt``, ``pictures`` and ``response`` of the first sample; nothing without a tokenizer."""
    if tokenizer is None or not samples:
        return
    request = samples[0].request
    response = chain.from_iterable(segment.token_ids for segment in samples[0].segments)
    for name, ids in (("prompt", list(request.prefix_ids)), ("response", list(response))):
        text = visible(str(tokenizer.decode(ids, skip_special_tokens=False)))
        yield name, f"{len(ids)} tokens: {shorten(text)!r}"
        if name == "prompt" and request.media is not None:
            yield "pictures", _pictures(request.media, len(ids))


def _pictures(media: Media, tokens: int) -> str:
    """Return the sizes of pictures in pixels, the number of their placeholders, and their arguments of the model."""
    sizes = ", ".join(f"{picture.shape[1]} x {picture.shape[0]}" for picture in media.pictures)
    added = tokens - len(media.engine_ids) + len(media.pictures)
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in media.items.items())
    return f"{added} tokens: {sizes} pixels as {shapes}"


def shorten(text: str, limit: int = MAX_CHARACTERS) -> str:
    """Return a text without its middle if it is longer than ``limit`` characters.

    Example:
        >>> shorten("abcdefgh", 4)
        'ab [4 characters] gh'
    """
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} [{len(text) - 2 * half} characters] {text[-half:]}"
